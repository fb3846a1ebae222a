// One attention head: maps of attention, scores and pairs side by side, drawn by CircuitsVis, with
// one large map, a readout of the cell under the pointer, a scrubber over pairs, and its tokens.
// CircuitsVis' own AttentionHeads shows maps side by side too, but draws all of them again whenever
// the pointer moves from one to the next, which takes seconds, and has one scale for all.
//
// root: an empty element in the document. data: what lens_rope/views/heads.py ships.
// mode: "light", "dark", or "page" where the page's style sheet follows the reader's choice.
function lensRopeHead(root, data, CircuitsVis, mode) {
  "use strict";
  var values = lensRopeHeadValues(data), views = lensRopeHeadViews(root, CircuitsVis);
  var maps = values.maps, nPairs = values.nPairs, redraw = views.redraw, area;
  var state = {
    map: 0, query: 0, key: 0, hover: null, own: false, from: data.groups.length ? data.groups[0][0] : 0
  };
  root.dataset.mode = mode;

  function openWindow(index) {
    area = values.open(index);
    state.hover = null;
    state.query = area.size - 1;
    state.key = area.first[state.query];
    // The cell that opens is the one with the most attention of the last query.
    values.fromQuery(maps[0], state.query).forEach(function (x, key, row) {
      if (x > row[state.key]) state.key = key;
    });
  }
  function limit(map, rows) {
    if (map.kind === "attention") return 1;
    if (map.kind === "score" || state.own) return values.largest(rows);
    // A band can be larger than any of what is side by side.
    return map.kind === "scrub" ? Math.max(area.limit, values.largest(rows)) : area.limit;
  }

  // ---- Text ----------------------------------------------------------------------------------

  function signed(x) { return (x < 0 ? "−" : "+") + Math.abs(x).toFixed(2); }
  function percent(x) { return (100 * x).toFixed(x && x < 0.1 ? 2 : 1) + "%"; }
  function cycles(pair) { return data.cycles[pair] + (data.cycles[pair] === "1" ? " cycle" : " cycles"); }
  function place(i) { return area.start + i; }
  function name(i) { return place(i) + " " + area.tokens[i]; }
  function scaleText(map, rows) {
    return map.kind === "attention" ? "0 to 1" : "±" + limit(map, rows).toFixed(2);
  }
  function add(parent, tag, className, text) {
    var element = parent.appendChild(document.createElement(tag));
    if (className) element.className = className;
    if (text !== undefined) element.textContent = text;
    return element;
  }

  function patternProps(map) {
    return function () {
      var rows = values.cells(map), most = limit(map, rows);
      map.scale.textContent = scaleText(map, rows);
      return {
        attention: rows, tokens: area.tokens, showAxisLabels: false, maskUpperTri: false,
        minValue: -most, maxValue: most, negativeColor: data.negative,
        positiveColor: map.kind === "attention" ? data.share : data.positive
      };
    };
  }

  // ---- The parts, from top to bottom -----------------------------------------------------------

  root.textContent = "";
  var bar = add(root, "div", "lr-bar");
  var choose = labelled(bar, "Tokens ", "select");
  data.windows.forEach(function (w) { add(choose, "option", "", w.name); });
  choose.selectedIndex = data.opening;
  choose.addEventListener("change", function () { openWindow(choose.selectedIndex); all(); });
  var own = labelled(bar, "", "input", " stretch each map’s colours to its own largest value");
  own.type = "checkbox";
  own.addEventListener("change", function () { state.own = own.checked; redrawMaps(); });

  var strip = add(root, "div", "lr-maps");
  maps.forEach(function (map, i) {
    var button = map.button = add(strip, "button", "lr-map");
    button.type = "button";
    map.label = add(button, "span", "lr-name", map.name);
    if (map.color) map.label.style.borderColor = map.color;
    map.view = views.add(button, "AttentionPattern", patternProps(map));
    map.scale = add(button, "span", "lr-scale");
    button.addEventListener("click", function () { state.map = i; select(); });
    follow(map.view.box);
  });

  if (nPairs) scrubber();
  var wide = add(root, "div", "lr-wide");
  var plot = add(wide, "div", "lr-plot-area"), left = add(plot, "div", "lr-left");
  var middle = add(plot, "div", "lr-main"), below = add(plot, "div", "lr-below");
  left.setAttribute("aria-hidden", "true");
  below.setAttribute("aria-hidden", "true");
  middle.tabIndex = 0;
  middle.setAttribute("role", "application");
  middle.setAttribute("aria-roledescription", "attention map");
  var main = views.add(middle, "AttentionPattern", function () {
    var map = maps[state.map], props = patternProps(map)();
    middle.setAttribute("aria-label", "Map of " + map.name + ", queries as rows and keys as columns. " +
      "Arrow keys move from cell to cell.");
    return props;
  });
  var across = add(middle, "div", "lr-across"), down = add(middle, "div", "lr-down");
  var cursor = add(middle, "div", "lr-cursor");
  follow(main.box);
  middle.addEventListener("keydown", function (event) {
    var step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!step || event.altKey || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    state.hover = null;
    pin(state.query + step[0], state.key + step[1]);
    spoken.textContent = sentence();
  });
  middle.addEventListener("focus", function () { spoken.textContent = sentence(); });
  var side = add(wide, "div", "lr-side"), readout = add(side, "div", "lr-readout");
  var spoken = add(root, "div", "lr-spoken");
  spoken.setAttribute("aria-live", "polite");

  var line = add(side, "div", "lr-line");
  var by = labelled(line, "Tokens coloured by ", "select");
  [["received", "attention received"], ["query", ""], ["mean", ""]].forEach(function (entry) {
    add(by, "option", "", entry[1]).value = entry[0];
  });
  by.addEventListener("change", function () { redraw(text); });
  var text = views.add(line, "ColoredTokens", tokenProps), meaning = add(line, "p", "lr-small");
  text.box.addEventListener("click", function (event) {
    var one = ".colored-tokens > span", spans = Array.from(text.box.querySelectorAll(one));
    var query = spans.indexOf(event.target.closest(one));
    if (query < 0) return;
    by.value = "query";
    pin(query, state.key);
    redraw(text);
  });
  data.notes.forEach(function (note) { add(root, "p", "lr-small", note); });

  function labelled(parent, before, tag, after) {
    var label = add(parent, "label", "", before), control = add(label, tag);
    if (after) label.append(after);
    return control;
  }

  function scrubber() {
    var box = add(root, "fieldset", "lr-scrub"), map = maps[maps.length - 1];
    add(box, "legend", "", "Scrub over pairs");
    var from = slider("first pair", 0, nPairs - 1, state.from);
    var count = slider("pairs in the band", 1, nPairs, 1);
    var says = add(box, "output", "lr-says");
    function slider(label, low, high, start) {
      var input = labelled(box, label + " ", "input");
      input.type = "range";
      input.min = low;
      input.max = high;
      input.value = start;
      input.addEventListener("input", function () {
        move();
        state.map = maps.length - 1;
        select();
        redraw(map.view);
      });
      return input;
    }
    function move() {
      var first = Number(from.value), n = Math.min(Number(count.value), nPairs - first), last = first + n - 1;
      map.pairs = values.range(first, n);
      map.name = values.groupName(map.pairs);
      map.label.textContent = "▸ " + map.name;
      map.label.style.borderColor = n === 1 ? data.colors[first] : "";
      says.textContent = map.name + ": wavelength " + data.wavelength[first] +
        (n === 1 ? "" : " to " + data.wavelength[last]) + " tokens, " +
        (n === 1 ? "" : data.cycles[first] + " to ") + cycles(last) + " over the context";
      from.setAttribute("aria-valuetext", says.textContent);
      count.setAttribute("aria-valuetext", says.textContent);
    }
    move();
  }

  // ---- The cell: pointer and keys ----------------------------------------------------------------

  function follow(box) {
    // The cells fill a map exactly, so that a place in it is a cell.
    function cell(event) {
      var rect = box.getBoundingClientRect();
      return {
        query: Math.floor((event.clientY - rect.top) * area.size / rect.height),
        key: Math.floor((event.clientX - rect.left) * area.size / rect.width)
      };
    }
    box.addEventListener("pointermove", function (event) {
      var at = cell(event);
      state.hover = values.isVisible(at.query, at.key) ? at : null;
      show();
    });
    box.addEventListener("pointerleave", function () { state.hover = null; show(); });
    box.addEventListener("click", function (event) {
      var at = cell(event);
      if (box === main.box && values.isVisible(at.query, at.key)) pin(at.query, at.key);
    });
  }
  function pin(query, key) {
    var before = state.query;
    state.query = Math.min(Math.max(query, 0), area.size - 1);
    state.key = Math.min(Math.max(key, area.first[state.query]), state.query);
    show();
    if (state.query !== before && by.value === "query") redraw(text);
  }
  function current() { return state.hover || state; }

  function sentence() {
    var at = current(), all = values.split(at), top = all.parts[0];
    return "query " + name(at.query) + ", key " + name(at.key) + ": attention " + percent(all.attention) +
      ", score " + signed(all.score) + (top ? ", most from pair " + top.pair + " with " + signed(top.value) +
      ", wavelength " + data.wavelength[top.pair] + " tokens" : "");
  }

  function show() {
    var at = current(), all = values.split(at), one = 100 / area.size + "%";
    var top = 100 * at.query / area.size + "%", from = 100 * at.key / area.size + "%";
    Object.assign(across.style, { top: top, height: one, width: from });
    Object.assign(down.style, { left: from, width: one, top: 100 * (at.query + 1) / area.size + "%" });
    Object.assign(cursor.style, { top: top, left: from, width: one, height: one });
    readout.textContent = "";
    var names = add(readout, "p", "lr-tokens");
    [["query", at.query], ["key", at.key]].forEach(function (entry) {
      add(names, "span", "lr-small", entry[0] + " " + place(entry[1]) + " ");
      add(names, "b", "", area.tokens[entry[1]]);
      names.append(entry[0] === "query" ? " → " : "");
    });
    var facts = add(readout, "p", "lr-facts");
    [
      ["attention", percent(all.attention)], ["score", signed(all.score)], ["distance", at.query - at.key]
    ].forEach(function (entry) {
      var fact = add(facts, "span");
      add(fact, "b", "", entry[1]);
      add(fact, "span", "lr-small", entry[0]);
    });
    if (all.parts.length || all.rest !== null) table(all);
    if (area.start) {
      add(readout, "p", "lr-small", percent(area.before[at.query]) +
        " of this query’s attention goes to keys before this window.");
    }
  }

  function table(all) {
    var rows = all.parts.slice(0, 6).map(function (part) {
      var wavelength = data.wavelength[part.pair] + " tokens";
      return { name: "pair " + part.pair, value: part.value, note: wavelength, color: data.colors[part.pair] };
    });
    var others = all.parts.slice(6), box = add(readout, "table"), head = add(add(box, "thead"), "tr");
    if (others.length) {
      var sum = others.reduce(function (sum, part) { return sum + part.value; }, 0);
      rows.push({ name: others.length + " others", value: sum, note: "" });
    }
    if (all.rest !== null) rows.push({ name: "not rotated", value: all.rest, note: "" });
    var most = values.largest([rows.map(function (row) { return row.value; })]);
    ["part of the score", "", "", "wavelength"].forEach(function (title) {
      add(head, title ? "th" : "td", "", title);
    });
    var body = add(box, "tbody");
    rows.forEach(function (row) {
      var line = add(body, "tr"), share = 50 * Math.abs(row.value) / most;
      add(line, "th", "", row.name).scope = "row";
      add(line, "td", "lr-value", signed(row.value));
      var bar = add(add(add(line, "td", "lr-cell"), "div", "lr-track"), "div");
      bar.style.left = (row.value < 0 ? 50 - share : 50) + "%";
      bar.style.width = share + "%";
      bar.style.background = row.color || data.pass_through;
      add(line, "td", "lr-small", row.note);
    });
  }

  // ---- Tokens and axes ---------------------------------------------------------------------------

  function tokenProps() {
    var map = maps[state.map], shown, most, says;
    by.options[1].textContent = map.name + " of one query";
    by.options[2].textContent = map.name + ", mean over queries";
    if (by.value === "received") {
      shown = values.received();
      most = 1;
      says = "Mean attention that each token receives from the queries of the whole prompt that see it; " +
        "full colour is 1.";
    } else if (by.value === "query") {
      shown = values.fromQuery(map, state.query);
      most = limit(map, values.cells(map));
      says = "From query " + name(state.query) + " to each token up to it. Click a token to make it the query.";
    } else {
      shown = values.mean(map);
      most = map.kind === "attention" ? 1 : values.largest([shown]);
      says = "Mean over the queries of this window that see the token.";
    }
    var isShare = by.value === "received" || map.kind === "attention";
    if (!isShare) says += " No colour is 0, full colour ±" + most.toFixed(2) + " score units.";
    meaning.textContent = says + " · is a space, ↵ a newline.";
    return {
      // CircuitsVis writes a token as HTML in the line and as text in its tooltip, so escaping would
      // show. A word joiner, which has no width, keeps < and & from opening anything.
      tokens: area.tokens.map(function (token) { return token.replace(/[<&]/g, "$&\u2060"); }),
      values: shown.map(function (x) { return Math.round(1e4 * x) / 1e4; }),
      minValue: -most, maxValue: most, paddingBottom: 0, negativeColor: data.negative,
      positiveColor: isShare ? data.share : data.positive
    };
  }

  function axes() {
    var size = middle.clientWidth / area.size, step = Math.max(1, Math.ceil(11 / (size || 11)));
    var isNarrow = left.clientWidth < 60;  // room for positions, not for tokens
    [left, below].forEach(function (axis, isColumn) {
      axis.textContent = "";
      for (var i = 0; i < area.size; i += step) {
        var label = isNarrow ? place(i) : isColumn ? name(i) : area.tokens[i] + " " + place(i);
        var span = add(axis, "span", "", label);
        span.style[isColumn ? "left" : "top"] = 100 * (i + 0.5) / area.size + "%";
      }
    });
  }

  function select() {
    maps.forEach(function (map, i) {
      map.button.setAttribute("aria-pressed", String(i === state.map));
    });
    redraw(main);
    redraw(text);
  }
  function redrawMaps() {
    maps.forEach(function (map) { redraw(map.view); });
    select();
  }
  function all() {
    redrawMaps();
    axes();
    show();
  }
  new ResizeObserver(axes).observe(middle);
  openWindow(data.opening);
  all();
}
