// Plays a step trace: queue, rows, slot table, block pool, step by step, forwards and back. Plain DOM, no library.
(function () {
  "use strict";
  var HUES = ["#4477aa", "#c2185b", "#228833", "#8d6e00", "#aa3377", "#00796b", "#5e35b1", "#bf360c"];
  var PHASES = ["grow", "compact", "admit", "prefill", "decode", "commit"];

  function el(tag, attributes, text) {
    var node = document.createElement(tag);
    Object.keys(attributes || {}).forEach(function (key) { node.setAttribute(key, attributes[key]); });
    if (text !== undefined) node.textContent = text;
    return node;
  }

  function svg(tag, attributes, text) {
    var node = document.createElementNS("http://www.w3.org/2000/svg", tag);
    Object.keys(attributes || {}).forEach(function (key) { node.setAttribute(key, attributes[key]); });
    if (text !== undefined) node.textContent = text;
    return node;
  }

  function plural(count, word) { return count + " " + word + (count === 1 ? "" : "s"); }

  function Stepper(host, data) {
    var colours = {}, at = 0, timer = null;
    data.steps.forEach(function (step) {
      step.submitted.forEach(function (id) {
        if (!(id in colours)) colours[id] = HUES[Object.keys(colours).length % HUES.length];
      });
    });
    host.textContent = "";
    host.setAttribute("tabindex", "0");
    host.setAttribute("role", "group");
    host.setAttribute("aria-label", "Step trace player; arrow keys move");
    var bar = el("div", { class: "st-bar" });
    var buttons = [["first", "|\u25C0", "First step"], ["back", "\u25C0", "One step back"], ["play", "\u25B6\u25B6", "Play"],
      ["next", "\u25B6", "One step on"], ["last", "\u25B6|", "Last step"]].map(function (b) {
      var button = el("button", { type: "button", "aria-label": b[2], title: b[2], "data-do": b[0] }, b[1]);
      bar.appendChild(button);
      return button;
    });
    var slider = el("input", { type: "range", min: 0, max: data.steps.length - 1, value: 0, "aria-label": "Step" });
    bar.appendChild(slider);
    var title = el("div", { class: "st-title" });
    var phases = el("ol", { class: "st-phases" });
    var queue = el("div", { class: "st-queue" });
    var table = el("div", { class: "st-scroll" });
    var pool = el("div", { class: "st-scroll" });
    var words = el("p", { class: "st-words", "aria-live": "polite" });
    [bar, title, phases, queue, table, pool, words].forEach(function (part) { host.appendChild(part); });

    function chip(id, note) {
      var node = el("span", { class: "st-chip" }, id + (note ? " " + note : ""));
      node.style.background = colours[id] || "#666";
      return node;
    }

    function facts(step) {
      var moved = step.moves.map(function (m) { return "row " + m[0] + " \u2192 " + m[1]; });
      var chunks = step.chunks.map(function (c) { return plural(c[2], "token") + " of row " + c[0] + " from " + c[1]; });
      return {
        grow: step.preempted.length ? "preempts " + step.preempted.join(", ") : "",
        compact: moved.join(", "),
        admit: step.admitted.map(function (a) { return a[1] + " into row " + a[0]; }).join(", "),
        prefill: chunks.join(", "),
        decode: step.decode_rows.length ? plural(step.decode_rows.length, "row") +
          (step.bucket ? " in bucket " + step.bucket[0] + " \u00D7 " + step.bucket[1] : "") +
          (step.replayed ? ", replayed" : ", eager: " + step.reason) : "",
        commit: step.events.filter(function (e) { return e[2]; }).map(function (e) { return e[0] + " ends"; }).join(", ")
      };
    }

    function drawPhases(step) {
      var told = facts(step);
      phases.textContent = "";
      PHASES.forEach(function (phase) {
        var item = el("li", { class: told[phase] ? "on" : "" });
        var name = data.links && data.links[phase] ? el("a", { href: data.links[phase] }, phase) : el("b", {}, phase);
        item.appendChild(name);
        item.appendChild(document.createTextNode(told[phase] ? ": " + told[phase] : ""));
        phases.appendChild(item);
      });
      return PHASES.filter(function (p) { return told[p]; }).map(function (p) { return p + " " + told[p]; }).join("; ");
    }

    function drawTable(step) {
      var size = data.block_size, left = 62, line = 26, rows = data.max_batch_size;
      var widest = data.widest, px = Math.max(3, Math.min(14, 560 / Math.max(1, widest)));
      var width = left + widest * px + 12;
      var picture = svg("svg", { viewBox: "0 0 " + width + " " + (rows * line + 16), width: width, height: rows * line + 16,
        role: "img", "aria-label": "Rows and the blocks that hold their tokens" });
      for (var row = 0; row < rows; row++) {
        var y = row * line + 2, id = step.rows[row], held = step.blocks[row] || [], stored = step.stored[row] || 0;
        picture.appendChild(svg("text", { x: 0, y: y + 15, class: "st-label" }, "row " + row));
        if (id !== undefined) picture.appendChild(svg("text", { x: 36, y: y + 15, class: "st-label", "font-weight": 600 }, id.slice(0, 3)));
        held.forEach(function (block, index) {
          var x = left + index * size * px, filled = Math.max(0, Math.min(size, stored - index * size));
          picture.appendChild(svg("rect", { x: x, y: y, width: filled * px, height: 19, fill: colours[id] }));
          if (step.written[row] && stored - 1 >= index * size && stored - 1 < (index + 1) * size)
            picture.appendChild(svg("rect", { x: x + (filled - Math.min(filled, step.written[row])) * px, y: y + 15,
              width: Math.min(filled, step.written[row]) * px, height: 4, class: "st-new" }));
          picture.appendChild(svg("rect", { x: x, y: y, width: size * px, height: 19, class: "st-box" }));
          picture.appendChild(svg("text", { x: x + size * px / 2, y: y + 14, class: filled * 2 >= size ? "st-in" : "st-out" }, block));
        });
      }
      if (step.bucket) {
        var w = Math.min(step.bucket[1], widest);
        picture.appendChild(svg("rect", { x: left - 2, y: 0, width: w * px + 4, height: step.bucket[0] * line - 2, class: step.replayed ? "st-bucket" : "st-bucket eager" }));
      }
      table.textContent = "";
      table.appendChild(picture);
    }

    function drawPool(step) {
      var owner = {}, cell = 17, across = Math.min(data.num_blocks, 32);
      Object.keys(step.blocks).forEach(function (row) {
        step.blocks[row].forEach(function (b) { owner[b] = b in owner ? "several" : step.rows[row]; });
      });
      var down = Math.ceil(data.num_blocks / across);
      var picture = svg("svg", { viewBox: "0 0 " + (across * cell + 2) + " " + (down * cell + 2), width: across * cell + 2, height: down * cell + 2,
        role: "img", "aria-label": "The block pool, each block in the colour of its owner" });
      for (var b = 0; b < data.num_blocks; b++) {
        var x = (b % across) * cell + 1, y = Math.floor(b / across) * cell + 1;
        picture.appendChild(svg("rect", { x: x, y: y, width: cell - 2, height: cell - 2, rx: 2, class: "st-block", fill: owner[b] ? colours[owner[b]] || "#777" : "none" }));
        picture.appendChild(svg("text", { x: x + 7.5, y: y + 11, class: owner[b] ? "st-in" : "st-out" }, b));
      }
      pool.textContent = "";
      pool.appendChild(picture);
    }

    function show(index) {
      at = Math.max(0, Math.min(data.steps.length - 1, index));
      var step = data.steps[at];
      slider.value = at;
      title.textContent = "step " + step.step + " of " + data.steps[data.steps.length - 1].step;
      queue.textContent = "queue: ";
      step.queue.forEach(function (id) { queue.appendChild(chip(id)); });
      if (!step.queue.length) queue.appendChild(document.createTextNode("nobody waits"));
      var summary = drawPhases(step);
      drawTable(step);
      drawPool(step);
      words.textContent = "Step " + step.step + ": " + (summary || "nothing to do") + ". " + plural(step.free_blocks, "block") + " free.";
      host.setAttribute("data-at", at);
    }

    function stop() {
      if (timer !== null) clearInterval(timer);
      timer = null;
    }

    function play() {
      if (timer !== null) return stop();
      timer = setInterval(function () { if (at + 1 >= data.steps.length) stop(); else show(at + 1); }, 700);
    }

    function act(name) {
      if (name !== "play") stop();
      ({ first: function () { show(0); }, back: function () { show(at - 1); }, play: play,
        next: function () { show(at + 1); }, last: function () { show(data.steps.length - 1); } })[name]();
    }

    buttons.forEach(function (button) { button.addEventListener("click", function () { act(button.getAttribute("data-do")); }); });
    slider.addEventListener("input", function () { stop(); show(Number(slider.value)); });
    host.addEventListener("keydown", function (event) {
      if (event.target === slider) return;
      var name = { ArrowRight: "next", ArrowLeft: "back", Home: "first", End: "last" }[event.key];
      if (name) { act(name); event.preventDefault(); }
    });
    show(0);
  }

  function start() {
    document.querySelectorAll(".stepper").forEach(function (host) {
      var data = host.querySelector('script[type="application/json"]');
      if (data) Stepper(host, JSON.parse(data.textContent));
    });
  }
  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", start);
  else start();
})();
