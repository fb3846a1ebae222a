(function () {
  "use strict";
  var theme = JSON.parse(document.getElementById("theme").textContent);
  var dark = window.matchMedia("(prefers-color-scheme: dark)");
  var coarse = window.matchMedia("(pointer: coarse)").matches;
  var config = {
    displaylogo: false,
    displayModeBar: coarse ? false : "hover",
    responsive: true,
    // Named one by one: Plotly's own selection has a button that opens its cloud.
    modeBarButtons: [["toImage", "zoom2d", "resetScale2d"]],
    showSendToCloud: false,
    toImageButtonOptions: { format: "svg", filename: "lens_rope" }
  };

  var plots = Array.prototype.map.call(document.querySelectorAll("[data-plot]"), function (element) {
    return { element: element, spec: JSON.parse(document.getElementById(element.dataset.plot).textContent) };
  });

  function draw(mode) {
    return Promise.all(plots.map(function (plot) {
      lensRopeRecolour(plot.spec, theme, mode);
      // A finger that drags over a figure wants to scroll the page.
      if (coarse) plot.spec.layout.dragmode = false;
      return Plotly.react(plot.element, plot.spec.data, plot.spec.layout, config);
    })).then(function () {
      document.documentElement.dataset.figures = mode;
    });
  }

  document.querySelectorAll("[data-view]").forEach(function (element) {
    var view = JSON.parse(document.getElementById(element.dataset.view).textContent);
    CircuitsVis.render(element.id, CircuitsVis[view.element], view.props);
  });
  draw(dark.matches ? "dark" : "light");
  dark.addEventListener("change", function () { draw(dark.matches ? "dark" : "light"); });
  // Paper is white whatever the screen is.
  window.addEventListener("beforeprint", function () { draw("light"); });
  window.addEventListener("afterprint", function () { draw(dark.matches ? "dark" : "light"); });

  // The section being read is marked in the navigation.
  var links = {};
  document.querySelectorAll("nav a").forEach(function (link) { links[link.hash.slice(1)] = link; });
  var observer = new IntersectionObserver(function (entries) {
    entries.forEach(function (entry) {
      if (!entry.isIntersecting) return;
      Object.keys(links).forEach(function (id) { links[id].removeAttribute("aria-current"); });
      links[entry.target.id].setAttribute("aria-current", "true");
    });
  }, { rootMargin: "-20% 0px -75% 0px" });
  document.querySelectorAll("main > section").forEach(function (section) { observer.observe(section); });
})();
