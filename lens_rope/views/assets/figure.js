// How a figure follows the page: its light and its dark form. `theme` holds the colours of both.
function lensRopeRecolour(spec, theme, mode) {
  "use strict";
  var layout = spec.layout;
  layout.font.color = theme.ink[mode];
  Object.keys(layout).forEach(function (key) {
    if (/^[xy]axis\d*$/.test(key)) {
      ["gridcolor", "zerolinecolor", "linecolor", "tickcolor"].forEach(function (name) {
        layout[key][name] = theme.grid[mode];
      });
    }
  });
  Object.keys(layout.meta.scales).forEach(function (axis) {
    layout[axis].colorscale = theme.scales[mode][layout.meta.scales[axis]];
  });
  spec.data.forEach(function (trace) {
    if (trace.meta === "ink") trace.line.color = theme.ink[mode];
  });
}
