// Draws one output of a notebook: unpacks the libraries it brings, then calls `draw(root, libraries)`
// for every element of this key that is not drawn yet (the same output can be shown twice).
function lensRopeOutput(key, packed, draw) {
  "use strict";
  // Shared by the outputs of a page, so that each library is unpacked once.
  var shared = window.__lensRopeLibraries || (window.__lensRopeLibraries = {});

  function load(name, base64) {
    if (!shared[name]) shared[name] = unpack(base64).then(function (code) { return run(name, code); });
    return shared[name];
  }

  function unpack(base64) {
    var bytes = Uint8Array.from(atob(base64), function (c) { return c.charCodeAt(0); });
    var stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return new Response(stream).text();
  }

  function run(name, code) {
    // A page may have a module loader, which the library would hand itself to, and may have another
    // version of the library, which stays where it is.
    var before = window[name], script = document.createElement("script");
    script.textContent = "(function (define, module, exports) {" + code + "\n;window." + name +
      " = typeof " + name + ' === "undefined" ? window.' + name + " : " + name + ";}).call(window);";
    document.head.appendChild(script);
    script.remove();
    var library = window[name];
    if (before) window[name] = before;
    return library;
  }

  function roots() {
    return document.querySelectorAll('[data-lens-rope="' + key + '"]:not([data-drawn])');
  }

  Promise.all(Object.keys(packed).map(function (name) { return load(name, packed[name]); })).then(function (loaded) {
    var libraries = {};
    Object.keys(packed).forEach(function (name, i) { libraries[name] = loaded[i]; });
    roots().forEach(function (root) {
      root.dataset.drawn = "";
      root.querySelectorAll(".lr-waiting").forEach(function (element) { element.remove(); });
      draw(root, libraries);
    });
  }).catch(function (error) {
    roots().forEach(function (root) {
      root.querySelectorAll(".lr-waiting").forEach(function (element) {
        element.textContent = "The figure cannot be drawn here: " + error.message;
      });
    });
  });
}

// Whether an output lies on a dark page: by its text, because every notebook says so differently.
function lensRopeMode(root) {
  "use strict";
  var c = getComputedStyle(root).color.match(/[\d.]+/g).map(Number);
  return 0.299 * c[0] + 0.587 * c[1] + 0.114 * c[2] > 128 ? "dark" : "light";
}
