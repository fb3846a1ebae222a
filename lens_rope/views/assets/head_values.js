// The numbers of one head: what a map of attention, scores or pairs holds in a window. `data` is what
// lens_rope/views/heads.py ships. Positions count from the start of the window that is open.
function lensRopeHeadValues(data) {
  "use strict";
  var q = floats(data.q), k = floats(data.k), nPairs = data.first.length;
  var area;  // the window that is open
  var maps = listMaps();
  return {
    nPairs: nPairs, maps: maps, open: open, cells: cells, value: value, split: split, largest: largest,
    isVisible: isVisible, received: received, fromQuery: fromQuery, mean: mean, range: range,
    groupName: groupName
  };

  function bytes(base64) {
    return Uint8Array.from(atob(base64), function (c) { return c.charCodeAt(0); }).buffer;
  }
  function floats(base64) { return new Float32Array(bytes(base64)); }
  function range(from, count) {
    return Array.from({ length: count }, function (_, i) { return from + i; });
  }

  // Re(z_q conj(z_k)) of one pair: the only formula here. All the rest is sums of it.
  function contribution(query, key, pair) {
    var i = (area.at + query) * data.d_head, j = (area.at + key) * data.d_head;
    var a = data.first[pair], b = data.second[pair];
    return data.scale * (q[i + a] * k[j + a] + q[i + b] * k[j + b]);
  }
  // Components that are not rotated are products of their own.
  function passThrough(query, key) {
    var i = (area.at + query) * data.d_head, j = (area.at + key) * data.d_head, sum = 0;
    data.rest.forEach(function (c) { sum += q[i + c] * k[j + c]; });
    return data.scale * sum;
  }

  function listMaps() {
    var all = range(0, nPairs), grouped = {};
    var list = [
      { kind: "attention", name: "attention" },
      { kind: "score", name: "score", pairs: all, rest: true }
    ];
    data.groups.forEach(function (group) {
      group.forEach(function (pair) { grouped[pair] = true; });
      var color = group.length === 1 ? data.colors[group[0]] : "";
      list.push({ kind: "pairs", name: groupName(group), pairs: group, color: color });
    });
    var others = all.filter(function (pair) { return !grouped[pair]; });
    if (data.groups.length && (others.length || data.rest.length)) {
      list.push({ kind: "pairs", name: "the rest", pairs: others, rest: data.rest.length > 0 });
    }
    if (nPairs) list.push({ kind: "scrub", name: "", pairs: [] });
    return list;
  }
  function groupName(group) {
    var last = group[group.length - 1];
    if (group.length === 1) return "pair " + group[0];
    return "pairs " + (last - group[0] === group.length - 1 ? group[0] + "–" + last : group.join(", "));
  }

  function open(index) {
    var w = data.windows[index];
    area = {
      at: w.at, start: w.start, size: w.size, before: w.before, pattern: new Uint16Array(bytes(w.pattern)),
      tokens: data.tokens.slice(w.at, w.at + w.size), limit: 0,
      first: range(w.at, w.size).map(function (i) { return Math.max(0, data.first_key[i] - w.start); })
    };
    // One scale for all pairs and bands, so that they can be compared: the largest of any of them.
    maps.filter(function (map) { return map.kind === "pairs"; }).concat(range(0, nPairs).map(function (pair) {
      return { kind: "pairs", pairs: [pair] };
    })).forEach(function (map) { area.limit = Math.max(area.limit, largest(cells(map))); });
    return area;
  }

  function isVisible(query, key) {
    return query >= 0 && query < area.size && key >= area.first[query] && key <= query;
  }
  function value(map, query, key) {
    if (map.kind === "attention") return area.pattern[query * area.size + key] / data.per_attention;
    return map.pairs.reduce(function (sum, pair) {
      return sum + contribution(query, key, pair);
    }, map.rest ? passThrough(query, key) : 0);
  }
  // The cells of a map: a row per query, which begins (with holes) at the first key that the query
  // sees and ends at its own. CircuitsVis draws the cells that are there; the grey behind it shows
  // where there are none.
  function cells(map) {
    return range(0, area.size).map(function (query) {
      var row = [];
      for (var key = area.first[query]; key <= query; key++) row[key] = value(map, query, key);
      return row;
    });
  }
  function largest(rows) {
    var most = 0;
    rows.forEach(function (row) {
      row.forEach(function (x) { most = Math.max(most, Math.abs(x)); });
    });
    return most || 1;
  }

  // One cell, with every pair in order of size.
  function split(at) {
    var parts = range(0, nPairs).map(function (pair) {
      return { pair: pair, value: contribution(at.query, at.key, pair) };
    });
    parts.sort(function (x, y) { return Math.abs(y.value) - Math.abs(x.value) || x.pair - y.pair; });
    return {
      attention: value(maps[0], at.query, at.key), score: value(maps[1], at.query, at.key), parts: parts,
      rest: data.rest.length ? passThrough(at.query, at.key) : null
    };
  }

  // A number for each token of the window.
  function received() { return data.received.slice(area.at, area.at + area.size); }
  function fromQuery(map, query) {
    return range(0, area.size).map(function (key) {
      return isVisible(query, key) ? value(map, query, key) : 0;
    });
  }
  function mean(map) {
    return range(0, area.size).map(function (key) {
      var seen = range(key, area.size - key).filter(function (query) { return isVisible(query, key); });
      return seen.reduce(function (sum, query) { return sum + value(map, query, key); }, 0) / seen.length;
    });
  }
}
