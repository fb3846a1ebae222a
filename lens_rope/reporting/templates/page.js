(function () {
  "use strict";
  var theme = JSON.parse(document.getElementById("theme").textContent);
  var root = document.documentElement;
  var subject = document.querySelector("h1").textContent;
  var dark = window.matchMedia("(prefers-color-scheme: dark)");
  var coarse = window.matchMedia("(pointer: coarse)").matches;
  var config = {
    // Plotly's bar of buttons is left out: it has one that opens its cloud, it cannot be reached by keys,
    // and an image must not hold buttons. Downloads have buttons of their own below each figure.
    displayModeBar: false,
    responsive: true,
    showSendToCloud: false
  };

  function specOf(element) { return JSON.parse(document.getElementById(element.dataset.plot).textContent); }
  var plots = {};
  document.querySelectorAll("[data-plot]").forEach(function (element) {
    plots[element.id] = { element: element, spec: specOf(element) };
  });

  // A figure that is folded away has no width yet; it will have that of its section.
  function widthOf(element) {
    return element.clientWidth || element.closest("section").clientWidth;
  }

  function draw(mode) {
    return Promise.all(Object.keys(plots).map(function (id) {
      var plot = plots[id];
      lensRopeRecolour(plot.spec, theme, mode);
      lensRopeFit(plot.spec, widthOf(plot.element));
      // A finger that drags over a figure wants to scroll the page.
      if (coarse) plot.spec.layout.dragmode = false;
      return Plotly.react(plot.element, plot.spec.data, plot.spec.layout, config);
    })).then(function () {
      root.dataset.figures = mode;
    });
  }
  function drawForScreen() { return draw(dark.matches ? "dark" : "light"); }

  drawForScreen();
  dark.addEventListener("change", drawForScreen);
  var resized = null;
  window.addEventListener("resize", function () {
    clearTimeout(resized);
    resized = setTimeout(function () {
      // Plotly follows the width on its own; only words may have to be broken anew.
      Object.keys(plots).forEach(function (id) {
        var plot = plots[id];
        if (!lensRopeFit(plot.spec, widthOf(plot.element))) return;
        Plotly.react(plot.element, plot.spec.data, plot.spec.layout, config);
      });
    }, 250);
  });

  document.addEventListener("click", function (event) {
    var button = event.target.closest("button[data-save]");
    if (!button) return;
    var plot = plots[button.dataset.figure];
    var format = button.dataset.save;
    lensRopeSaveFrom(button, Plotly, plot.element, specOf(plot.element), theme, subject, format);
  });

  // Paper is white whatever the screen is, and narrower: the page takes the width of a sheet before
  // figures are drawn for it. What a sheet cannot unfold is unfolded.
  var unfolded = [];
  window.addEventListener("beforeprint", function () {
    root.classList.add("paper");
    unfolded = Array.from(document.querySelectorAll("details.printed:not([open])"));
    unfolded.forEach(function (element) { element.open = true; });
    // Plotly would keep the width that a figure has; the browser prints as soon as this returns.
    Object.keys(plots).forEach(function (id) { plots[id].spec.layout.width = widthOf(plots[id].element); });
    draw("light");
  });
  window.addEventListener("afterprint", function () {
    root.classList.remove("paper");
    unfolded.forEach(function (element) { element.open = false; });
    Object.keys(plots).forEach(function (id) { plots[id].spec.layout.width = widthOf(plots[id].element); });
    drawForScreen().then(function () {
      // From here on figures follow the width of the page again.
      Object.keys(plots).forEach(function (id) { delete plots[id].spec.layout.width; });
    });
  });

  // The section being read is marked in the navigation: the last that begins in the upper part of the
  // window, or, at the end of the page, the last of all.
  var links = Array.from(document.querySelectorAll("nav a[href^='#']")).filter(function (link) {
    return document.getElementById(link.hash.slice(1));
  });
  var sections = links.map(function (link) { return document.getElementById(link.hash.slice(1)); });
  var marked = null, waiting = false;
  function mark() {
    waiting = false;
    var current = 0;
    sections.forEach(function (section, i) {
      if (section.getBoundingClientRect().top < window.innerHeight * 0.3) current = i;
    });
    if (window.scrollY > 0 && window.innerHeight + window.scrollY >= root.scrollHeight - 2) current = sections.length - 1;
    if (links[current] === marked) return;
    if (marked) marked.removeAttribute("aria-current");
    marked = links[current];
    marked.setAttribute("aria-current", "true");
    // On a narrow page the navigation is a row that scrolls on its own.
    var row = marked.closest("nav");
    if (row.scrollWidth > row.clientWidth) row.scrollLeft = marked.offsetLeft - row.clientWidth / 2;
  }
  function later() {
    if (!waiting) { waiting = true; window.requestAnimationFrame(mark); }
  }
  if (links.length) {
    window.addEventListener("scroll", later, { passive: true });
    window.addEventListener("resize", later);
    mark();
  }
})();
