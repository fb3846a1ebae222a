// Draws one output of a notebook: unpacks the libraries it brings, then calls `draw(root, libraries)`
// for every element of this key that is not drawn yet (the same output can be shown twice). `packed`
// holds `{id, code}` by the name of the library, `code` as gzip in base64.
function lensRopeOutput(key, packed, draw) {
  "use strict";
  // Shared by the outputs of a page, so that each library is unpacked once. Outputs of another
  // version of the package may bring another version of the library, hence the id.
  var shared = window.__lensRopeLibraries || (window.__lensRopeLibraries = {});

  function load(name) {
    var id = packed[name].id;
    if (!shared[id]) {
      shared[id] = Promise.resolve(packed[name].code).then(unpack).then(function (code) {
        return run(name, code);
      });
      // What failed here may work for the next output.
      shared[id].catch(function () { delete shared[id]; });
    }
    return shared[id];
  }

  function unpack(base64) {
    var bytes = Uint8Array.from(atob(base64), function (c) { return c.charCodeAt(0); });
    var stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return new Response(stream).text();
  }

  function run(name, code) {
    // A page may have a module loader, which the library would hand itself to, and may have another
    // version of the library, which stays where it is; where there was none, none is left behind.
    var had = name in window, before = window[name], script = document.createElement("script");
    script.textContent = "(function (define, module, exports) {" + code + "\n;window." + name +
      " = typeof " + name + ' === "undefined" ? window.' + name + " : " + name + ";}).call(window);";
    document.head.appendChild(script);
    script.remove();
    var library = window[name];
    if (had) window[name] = before;
    else delete window[name];
    if (!library || library === before) throw new Error(name + " could not be loaded");
    return library;
  }

  function roots() {
    return document.querySelectorAll('[data-lens-rope="' + key + '"]:not([data-drawn])');
  }

  function say(root, error) {
    root.querySelectorAll(".lr-waiting").forEach(function (element) {
      element.textContent = "The figure cannot be drawn here: " + error.message;
    });
  }

  function show(root, libraries) {
    root.dataset.drawn = "";
    // Here and not in a chain, so that one that fails leaves the others alone.
    Promise.resolve().then(function () { return draw(root, libraries); }).then(function () {
      root.querySelectorAll(".lr-waiting").forEach(function (element) { element.remove(); });
      root.dataset.drawn = "done";
    }).catch(function (error) { say(root, error); });
  }

  var names = Object.keys(packed);
  Promise.resolve().then(function () { return Promise.all(names.map(load)); }).then(function (loaded) {
    var libraries = {};
    names.forEach(function (name, i) { libraries[name] = loaded[i]; });
    roots().forEach(function (root) { show(root, libraries); });
  }).catch(function (error) { roots().forEach(function (root) { say(root, error); }); });
}

// Whether an output lies on a dark page: by its text, because every notebook says so differently.
function lensRopeMode(root) {
  "use strict";
  var canvas = document.createElement("canvas");
  canvas.width = canvas.height = 1;
  // A canvas knows every way in which CSS writes a colour.
  var context = canvas.getContext("2d");
  context.fillStyle = getComputedStyle(root).color;
  context.fillRect(0, 0, 1, 1);
  var c = context.getImageData(0, 0, 1, 1).data;
  return 0.299 * c[0] + 0.587 * c[1] + 0.114 * c[2] > 128 ? "dark" : "light";
}

// Calls `redraw(mode)` when the page turns dark or light under an output.
function lensRopeWatch(root, redraw) {
  "use strict";
  var mode = lensRopeMode(root), isWatching = false;
  var scheme = window.matchMedia("(prefers-color-scheme: dark)");

  function look() {
    // What is not in the page has no colour.
    if (!root.isConnected) return;
    var now = lensRopeMode(root);
    if (now === mode) return;
    mode = now;
    redraw(mode);
  }

  // The new style sheet may come a little after the attribute that asks for it.
  function soon() {
    look();
    setTimeout(look, 500);
  }

  var observer = new MutationObserver(soon);
  // Sizes are told of when an element goes from the page and when it comes back: notebooks take an
  // output out while it is off the screen, and one that is gone for good leaves nothing behind.
  new ResizeObserver(function () {
    if (root.isConnected === isWatching) return;
    isWatching = root.isConnected;
    if (isWatching) {
      observer.observe(document.documentElement, { attributes: true });
      observer.observe(document.body, { attributes: true });
      scheme.addEventListener("change", soon);
      look();
    } else {
      observer.disconnect();
      scheme.removeEventListener("change", soon);
    }
  }).observe(root);
}
