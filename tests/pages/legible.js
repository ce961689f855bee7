// What a reader cannot read on the page that is open: text too faint for its ground (WCAG AA), drawings set too small.
// It opens every fold first. Run with execute_script; the answer is a list of sentences, empty when all is well.
(function () {
  "use strict";
  var LEAST_PX = 9;

  function parts(colour) {
    var found = colour.match(/[\d.]+/g).map(Number);
    if (/^color\(srgb/.test(colour)) found = [found[0] * 255, found[1] * 255, found[2] * 255, found[3]];
    return [found[0], found[1], found[2], found[3] === undefined ? 1 : found[3]];
  }

  function over(top, below) {  // both [r, g, b, a]; below is opaque
    return [0, 1, 2].map(function (i) { return top[i] * top[3] + below[i] * (1 - top[3]); }).concat(1);
  }

  function light(colour) {
    var c = colour.slice(0, 3).map(function (v) {
      v /= 255;
      return v <= 0.03928 ? v / 12.92 : Math.pow((v + 0.055) / 1.055, 2.4);
    });
    return 0.2126 * c[0] + 0.7152 * c[1] + 0.0722 * c[2];
  }

  function contrast(a, b) {
    var one = light(a), other = light(b);
    return (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05);
  }

  function faded(colour, element, root) {  // with the opacity of everything up to root
    var alpha = colour[3];
    for (var e = element; e && e !== root; e = e.parentElement) alpha *= Number(getComputedStyle(e).opacity);
    return [colour[0], colour[1], colour[2], alpha];
  }

  function ground(element) {
    var layers = [];
    for (var e = element; e; e = e.parentElement) {
      var colour = parts(getComputedStyle(e).backgroundColor);
      if (colour[3] > 0) layers.push(colour);
      if (colour[3] === 1) break;
    }
    return layers.reverse().reduce(function (below, top) { return over(top, below); }, [255, 255, 255, 1]);
  }

  function shapesBelow(text, svg) {  // the ground of a drawing's text: every filled shape drawn earlier at its middle
    var box = text.getBoundingClientRect(), x = box.x + box.width / 2, y = box.y + box.height / 2;
    var colour = ground(svg.parentElement);
    svg.querySelectorAll("rect").forEach(function (shape) {
      if (!(shape.compareDocumentPosition(text) & Node.DOCUMENT_POSITION_FOLLOWING)) return;
      var at = shape.getBoundingClientRect(), fill = getComputedStyle(shape).fill;
      if (fill === "none" || x < at.left || x > at.right || y < at.top || y > at.bottom) return;
      colour = over(faded(parts(fill), shape, svg), colour);
    });
    return colour;
  }

  function judge(words, colour, below, size, bold) {
    var least = size >= 24 || (bold && size >= 18.66) ? 3 : 4.5, found = contrast(over(colour, below), below);
    return found + 0.005 < least ? "'" + words.trim().slice(0, 40) + "' has a contrast of " + found.toFixed(2) : "";
  }

  window.illegible = function () {
    var told = {};
    document.querySelectorAll("details").forEach(function (d) { d.open = true; });
    var walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), node;
    while ((node = walker.nextNode())) {
      var e = node.parentElement;
      if (!node.data.trim() || !e.checkVisibility({ visibilityProperty: true, opacityProperty: true })) continue;
      if (e.closest("script, noscript, style, .md-nav, .md-search, .md-header, svg")) continue;
      var style = getComputedStyle(e), said = judge(node.data, faded(parts(style.color), e, null), ground(e),
        parseFloat(style.fontSize), Number(style.fontWeight) >= 700);
      if (said) told[said] = true;
    }
    document.querySelectorAll(".md-content svg[viewBox] text").forEach(function (text) {
      var svg = text.ownerSVGElement, style = getComputedStyle(text);
      var scale = svg.getBoundingClientRect().width / svg.viewBox.baseVal.width, size = parseFloat(style.fontSize) * scale;
      var said = judge(text.textContent, faded(parts(style.fill), text, svg), shapesBelow(text, svg), size, false);
      if (said) told["drawing: " + said] = true;
      var frame = svg.getBoundingClientRect(), box = text.getBoundingClientRect();
      if (box.left < frame.left - 1 || box.right > frame.right + 1)
        told["drawing: '" + text.textContent.slice(0, 40) + "' runs out of its frame"] = true;
      if (size < LEAST_PX) told["drawing: '" + text.textContent + "' is " + size.toFixed(1) + " px high"] = true;
    });
    return Object.keys(told);
  };
})();
return window.illegible();
