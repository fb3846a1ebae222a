// Views of CircuitsVis that can be drawn again. `root.dataset.state` says whether all that were asked
// for are "drawn".
function lensRopeHeadViews(root, CircuitsVis) {
  "use strict";
  // Shared by all heads of a page, and by the copies of this script that outputs of a notebook bring.
  var shared = window.__lensRopeHeads ||
    (window.__lensRopeHeads = { ids: 0, queue: [], isDrawing: false });
  var views = [];

  // CircuitsVis renders and keeps the React root to itself, so a second rendering would leave the
  // first chart behind, in memory for good. What is rendered once is therefore a component of our
  // own, which can be told to take new properties. React calls anything a class component that
  // says so on its prototype, and gives it its updater.
  function Live(props) { this.props = props; }
  Live.prototype.isReactComponent = {};
  Live.prototype.render = function () {
    // Any element of this React serves as the form of another.
    var form = CircuitsVis.Hello({ name: "" }), view = this.props.view;
    view.rendered = view.asked;
    return Object.assign({}, form, { type: this.props.component, props: view.props });
  };
  Live.prototype.componentDidMount = function () { this.props.view.live = this; done(this.props.view); };
  Live.prototype.componentDidUpdate = function () { done(this.props.view); };

  // `props` makes the properties when the view is drawn. `asked` counts the drawings that React was
  // asked for, of which it may do several at once; `shown` is the last that it is done with.
  function add(parent, component, props) {
    var box = document.createElement("div");
    var view = { box: box, isQueued: false, isMissed: false, asked: 0, shown: 0 };
    box.className = "cv " + component;
    box.setAttribute("aria-hidden", "true");
    parent.appendChild(box);
    view.draw = function () {
      // What is asked for from here on has to be drawn again.
      view.isQueued = false;
      view.props = props();
      view.asked++;
      if (view.live) return view.live.updater.enqueueForceUpdate(view.live);
      var mount = box.appendChild(document.createElement("div"));
      mount.id = "lens-rope-cv-" + shared.ids++;
      CircuitsVis.render(mount.id, Live, { component: CircuitsVis[component], view: view });
    };
    views.push(view);
    return view;
  }

  // Maps take a while, so they are drawn one after another, those on the screen first.
  function redraw(view) {
    root.dataset.state = "drawing";
    if (view.isQueued) return;
    view.isQueued = true;
    view.isMissed = false;
    shared.queue.push(view);
    if (!shared.isDrawing) { shared.isDrawing = true; setTimeout(drawNext); }
  }
  function drawNext() {
    // An output that a notebook has removed has nothing to draw into; it may come back.
    shared.queue = shared.queue.filter(function (view) {
      if (view.box.isConnected) return true;
      view.isQueued = false;
      view.isMissed = true;
      return false;
    });
    if (!shared.queue.length) { shared.isDrawing = false; return; }
    var next = Math.max(0, shared.queue.findIndex(function (view) {
      var box = view.box.getBoundingClientRect();
      return box.bottom > 0 && box.top < window.innerHeight;
    }));
    // A view that cannot be drawn leaves the others alone.
    try { shared.queue.splice(next, 1)[0].draw(); } finally { setTimeout(drawNext); }
  }
  // Sizes are told of when an element goes from the page and when it comes back.
  new ResizeObserver(function () {
    if (root.isConnected) views.filter(function (view) { return view.isMissed; }).forEach(redraw);
  }).observe(root);
  function done(view) {
    view.shown = view.rendered;
    if (!views.some(isPending)) settle(300);
  }
  function isPending(view) { return view.isQueued || view.isMissed || view.shown !== view.asked; }
  // A chart is painted a few frames after React is done with it. In a place that is hidden it never
  // is, hence the limit.
  function settle(frames) {
    requestAnimationFrame(function () {
      if (views.some(isPending)) return;
      if (frames && !views.every(isPainted)) settle(frames - 1);
      else requestAnimationFrame(function () {
        if (!views.some(isPending)) root.dataset.state = "drawn";
      });
    });
  }
  function isPainted(view) {
    var canvas = view.box.querySelector("canvas"), probe = shared.probe;
    if (!canvas) return view.box.textContent !== "";
    if (!canvas.width || !canvas.height) return false;
    if (!probe) {
      // A few pixels of our own: reading from the chart's canvas would make it slow.
      probe = shared.probe = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
      probe.canvas.width = probe.canvas.height = 16;
    }
    probe.clearRect(0, 0, 16, 16);
    probe.drawImage(canvas, 0, 0, 16, 16);
    return probe.getImageData(0, 0, 16, 16).data.some(function (x) { return x > 0; });
  }

  return { add: add, redraw: redraw };
}
