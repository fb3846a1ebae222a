// How a figure follows the page, and how it is downloaded. `theme` holds the colours of both forms,
// `spec` is a figure with its title and its table in `layout.meta`.

function lensRopeRecolour(spec, theme, mode) {
  "use strict";
  var layout = spec.layout;
  // The page shows through.
  layout.paper_bgcolor = "rgba(0,0,0,0)";
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
  (layout.annotations || []).forEach(function (note) {
    // Only words in the colour of marks have a colour of their own.
    if (theme.mark && note.font && note.font.color) note.font.color = theme.mark[mode];
  });
  spec.data.forEach(function (trace) {
    if (trace.meta !== "ink") return;
    if (trace.line) trace.line.color = theme.ink[mode];
    if (trace.textfont) trace.textfont.color = theme.ink[mode];
  });
}

// Text in lines of at most `room` characters; tags, which Plotly reads, count for nothing.
function lensRopeWrap(text, room) {
  "use strict";
  return text.split("<br>").map(function (line) {
    var used = 0;
    return line.replace(/(<[^>]*>)|(\s*)([^\s<]+)/g, function (_, tag, space, word) {
      if (tag) return tag;
      var breaks = used > 0 && used + space.length + word.length > room;
      used = breaks ? word.length : used + space.length + word.length;
      return (breaks ? "<br>" : space) + word;
    });
  }).join("<br>");
}

// Fits a figure to the width that it is drawn at: long titles are broken into lines, and labels along
// the horizontal axis that would run into each other are left out. Returns whether anything changed.
function lensRopeFit(spec, width) {
  "use strict";
  var layout = spec.layout, before = JSON.stringify(layout.meta.fitted), fitted = {};
  // What the figure was made with, so that it can be fitted again.
  var made = layout.meta.made || (layout.meta.made = { titles: {}, texts: {} });
  var inner = width - 70, x = layout.xaxis, isLog = x.type === "log";

  function place(value) {
    var at = isLog ? Math.log10(value) : value;
    return (at - x.range[0]) / (x.range[1] - x.range[0]) * inner;
  }
  function apart(values, labels) {
    var end = -Infinity;
    return labels.map(function (label, i) {
      var half = label.length * 3.6, at = place(values[i]);
      if (at - half < end + 2) return "";
      end = at + half;
      return label;
    });
  }

  Object.keys(layout).forEach(function (key) {
    var owner = /^xaxis\d*$/.test(key) ? layout[key] : /^coloraxis/.test(key) ? layout[key].colorbar : null;
    if (!owner || !owner.title || !owner.title.text) return;
    var domain = owner.domain ? owner.domain[1] - owner.domain[0] : 1;
    if (!(key in made.titles)) made.titles[key] = owner.title.text;
    owner.title.text = fitted[key] = lensRopeWrap(made.titles[key], Math.floor(inner * domain / 6.4));
  });
  if (x.range && x.ticktext) {
    if (!made.ticks) made.ticks = x.ticktext;
    x.ticktext = fitted.ticks = apart(lensRopeNumbers(x.tickvals), made.ticks);
  }
  spec.data.forEach(function (trace, i) {
    if (trace.mode !== "text" || !x.range) return;
    if (!made.texts[i]) made.texts[i] = trace.text;
    trace.text = fitted["text" + i] = apart(lensRopeNumbers(trace.x), made.texts[i]);
  });
  layout.meta.fitted = fitted;
  return before !== JSON.stringify(fitted);
}

// The numbers of a column, whether they came as a list or as packed bytes.
function lensRopeNumbers(column) {
  "use strict";
  if (!column.bdata) return column;
  var kinds = {
    f4: Float32Array, f8: Float64Array, i1: Int8Array, u1: Uint8Array, i2: Int16Array, u2: Uint16Array,
    i4: Int32Array, u4: Uint32Array
  };
  var bytes = Uint8Array.from(atob(column.bdata), function (c) { return c.charCodeAt(0); });
  return new kinds[column.dtype](bytes.buffer);
}

// The table of a figure as CSV; a value that does not exist is an empty field.
function lensRopeCsv(spec) {
  "use strict";
  var table = spec.layout.meta.table, names = Object.keys(table);

  function field(value, dtype) {
    if (typeof value === "number" || value === null) {
      if (!Number.isFinite(value)) return "";
      // What the figure holds in single precision has seven digits that mean something.
      var isCount = Number.isInteger(value) && dtype !== "f4";
      return String(isCount ? value : Number(value.toPrecision(7)));
    }
    // A spreadsheet would run text that begins like a formula.
    var text = /^[=+\-@\t\r]/.test(value) ? "'" + value : value;
    return /[",\r\n]/.test(text) ? '"' + text.replace(/"/g, '""') + '"' : text;
  }

  function fields(column) {
    return Array.from(lensRopeNumbers(column), function (value) { return field(value, column.dtype); });
  }

  var columns = names.map(function (name) {
    var column = table[name];
    if (!column.codes) return fields(column);
    var levels = fields(column.levels);
    return Array.from(lensRopeNumbers(column.codes), function (code) { return levels[code]; });
  });
  var rows = columns[0].map(function (_, row) {
    return columns.map(function (column) { return column[row]; }).join(",");
  });
  return [names.map(function (name) { return field(name); }).join(",")].concat(rows).join("\r\n") + "\r\n";
}

// A name that every file system takes.
function lensRopeFileName(spec, subject) {
  "use strict";
  return [subject, spec.layout.meta.title].filter(Boolean).join(" ").toLowerCase()
    .replace(/[^a-z0-9.]+/g, "-").replace(/^[-.]+|[-.]+$/g, "").slice(0, 120) || "figure";
}

// Saves a figure as "csv", "svg" or "png"; `spec` is the figure as it was made, not as Plotly left it.
// Pictures are in the light form on white, with a title that
// names the `subject`, so that they can stand alone.
function lensRopeSave(Plotly, element, spec, theme, subject, format) {
  "use strict";
  var name = lensRopeFileName(spec, subject);
  if (format === "csv") {
    // The mark at the beginning tells spreadsheets that this is UTF-8.
    var blob = new Blob(["\ufeff" + lensRopeCsv(spec)], { type: "text/csv;charset=utf-8" });
    var link = document.createElement("a");
    link.href = URL.createObjectURL(blob);
    link.download = name + ".csv";
    document.body.appendChild(link);
    link.click();
    link.remove();
    // A browser may read the blob a little later.
    setTimeout(function () { URL.revokeObjectURL(link.href); }, 10000);
    return Promise.resolve(name + ".csv");
  }
  var copy = JSON.parse(JSON.stringify(spec)), layout = copy.layout, title = 40, drawn = element._fullLayout;
  lensRopeRecolour(copy, theme, "light");
  lensRopeFit(copy, 960);
  delete layout.width;
  layout.paper_bgcolor = layout.plot_bgcolor = "#ffffff";
  // Colour bars and legends take their room above the plot; the title goes above them.
  layout.margin = Object.assign({}, layout.margin, { t: Math.max(layout.margin.t, drawn ? drawn._size.t : 0) + title });
  var words = [spec.layout.meta.title, subject].filter(Boolean).join(" · ");
  // An annotation, because Plotly moves titles out of sight in pictures that it makes off the screen.
  layout.annotations = (layout.annotations || []).concat({
    // Plotly reads text as HTML.
    text: words.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;"),
    showarrow: false, xref: "paper", x: 0, xanchor: "left", xshift: 10 - layout.margin.l,
    yref: "paper", y: 1, yanchor: "middle", yshift: layout.margin.t - 22,
    font: { size: 16, color: theme.ink.light }
  });
  return Plotly.downloadImage(copy, {
    format: format, filename: name, width: 960, height: layout.height + title, scale: format === "png" ? 2 : 1
  });
}

// The same at the click of a button, which says so if nothing can be saved.
function lensRopeSaveFrom(button, Plotly, element, spec, theme, subject, format) {
  "use strict";
  return lensRopeSave(Plotly, element, spec, theme, subject, format).catch(function (error) {
    button.textContent = format.toUpperCase() + " failed: " + error.message;
  });
}
