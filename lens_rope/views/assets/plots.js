// Draws the figures of one output into its elements `.lr-plot`, in order, each with its buttons.
function lensRopePlots(root, Plotly, theme, specs, subject) {
  "use strict";
  var elements = Array.from(root.querySelectorAll(".lr-plot"));
  var config = {
    // An element that is an image for screen readers cannot hold buttons.
    displayModeBar: false, responsive: false,
    // A token can hold dollar signs, and the page can hold MathJax.
    typesetMath: false
  };

  function draw(mode) {
    return Promise.all(elements.map(function (element, i) {
      var spec = JSON.parse(JSON.stringify(specs[i]));
      lensRopeRecolour(spec, theme, mode);
      return Plotly.react(element, spec.data, spec.layout, config);
    }));
  }

  function buttons(element, spec) {
    var bar = document.createElement("div");
    bar.className = "lr-save";
    ["svg", "png"].concat(spec.layout.meta.table ? ["csv"] : []).forEach(function (format) {
      var button = document.createElement("button");
      button.type = "button";
      button.textContent = format.toUpperCase();
      button.setAttribute("aria-label", "Save as " + format.toUpperCase() + ": " + (spec.layout.meta.title || "figure"));
      button.addEventListener("click", function () {
        lensRopeSaveFrom(button, Plotly, element, spec, theme, subject, format);
      });
      bar.appendChild(button);
    });
    element.insertAdjacentElement("afterend", bar);
  }

  return draw(lensRopeMode(root)).then(function () {
    elements.forEach(function (element, i) { buttons(element, specs[i]); });
    lensRopeWatch(root, draw);
    if (!window.ResizeObserver) return;
    // Side bars of a notebook change the width of an output without a resize of the window.
    var widths = elements.map(function (element) { return element.clientWidth; });
    var observer = new ResizeObserver(function () {
      elements.forEach(function (element, i) {
        if (!element.clientWidth || element.clientWidth === widths[i]) return;
        widths[i] = element.clientWidth;
        Plotly.Plots.resize(element);
      });
    });
    elements.forEach(function (element) { observer.observe(element); });
  });
}
