// The colors and patterns of the picture, from the page's theme. A kind of cell has its own pattern, and a request its own hue.
"use strict";
(function (root) {
  const EB = (root.EB = root.EB || {});
  const PALETTE = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#a89a00", "#7b61c9"];

  const channels = (hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));

  function mix(a, b, share) {
    const [from, to] = [channels(a), channels(b)];
    return `#${from.map((part, i) => Math.round(part * share + to[i] * (1 - share)).toString(16).padStart(2, "0")).join("")}`;
  }

  // Black or white, whichever is readable on a color.
  function readableOn(color) {
    const [red, green, blue] = channels(color);
    return 0.3 * red + 0.59 * green + 0.11 * blue > 128 ? "#10151b" : "#ffffff";
  }

  // A pattern that repeats a painted square, as sharp as the screen.
  function pattern(context, size, paint) {
    const ratio = root.devicePixelRatio || 1;
    const tile = document.createElement("canvas");
    tile.width = tile.height = Math.round(size * ratio);
    const brush = tile.getContext("2d");
    brush.scale(tile.width / size, tile.width / size);
    paint(brush);
    const result = context.createPattern(tile, "repeat");
    result.setTransform(new DOMMatrix().scale(size / tile.width));
    return result;
  }

  function hatch(context, hue, paper) {
    return pattern(context, 6, (brush) => {
      brush.fillStyle = mix(hue, paper, 0.14);
      brush.fillRect(0, 0, 6, 6);
      brush.strokeStyle = mix(hue, paper, 0.75);
      brush.lineWidth = 1.3;
      brush.beginPath();
      for (const at of [-6, 0, 6]) {
        brush.moveTo(at - 1, 7);
        brush.lineTo(at + 7, -1);
      }
      brush.stroke();
    });
  }

  function dots(context, hue, paper) {
    return pattern(context, 4, (brush) => {
      brush.fillStyle = mix(hue, paper, 0.1);
      brush.fillRect(0, 0, 4, 4);
      brush.fillStyle = mix(hue, paper, 0.7);
      brush.fillRect(1, 1, 1.4, 1.4);
    });
  }

  function paintsOf(canvas, context) {
    const style = getComputedStyle(canvas);
    const value = (name, fallback) => style.getPropertyValue(name).trim() || fallback;
    const ink = value("--ink", "#1b1f24"), paper = value("--panel", "#ffffff"), tint = Number(value("--tint", "0.5"));
    return {
      ink, paper, font: style.fontFamily,
      faint: value("--faint", "#8b949e"), track: value("--track", "#eef0f3"), line: value("--line", "#d0d7de"),
      queueInk: value("--queue", "#6e7781"),
      fills: PALETTE.map((hue) => ({
        prefill: hue,
        decode: mix(hue, paper, tint),
        edge: mix(hue, ink, 0.55),
        held: hatch(context, hue, paper),
        dots: dots(context, hue, paper),
        label: readableOn(mix(hue, paper, tint)),
      })),
    };
  }

  Object.assign(EB, { PALETTE, paintsOf });
})(globalThis);
