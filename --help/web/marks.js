// Draws over the cells of a picture: switches of the policy, gaps in the record, what the caption and the pointer are at.
"use strict";
(function (root) {
  const EB = (root.EB = root.EB || {});
  const { TOP, AXIS } = EB;
  const LABEL = 18; // height of a policy's name

  // view = {mark: {n, slots} of the caption, hover: {index, slot}, area: {from, to, top, bottom}}; each may be missing
  function drawMarks(picture, model, { mark, hover, area }) {
    drawGaps(picture, model);
    drawSwitches(picture, model);
    if (mark) drawCaption(picture, model, mark);
    if (area) drawArea(picture, area);
    else if (hover) drawHover(picture, hover);
  }

  function drawGaps(picture, model) {
    const { context } = picture;
    for (let i = picture.from; i <= picture.to; i++) {
      if (!model.columns[i].gapBefore) continue;
      context.strokeStyle = picture.ink;
      context.setLineDash([4, 3]);
      context.beginPath();
      context.moveTo(picture.x0(i), 0);
      context.lineTo(picture.x0(i), picture.height - AXIS);
      context.stroke();
      context.setLineDash([]);
    }
  }

  // Mark where the policy changed, and to which; the name is on the left of the line where the right has no room.
  function drawSwitches(picture, model) {
    const { context } = picture;
    let end = -Infinity, level = 0;
    for (let i = Math.max(picture.from, 1); i <= picture.to; i++) {
      const { policy } = model.columns[i];
      if (policy === model.columns[i - 1].policy) continue;
      const x = Math.round(picture.x0(i));
      context.font = `600 12px ${picture.font}`;
      context.textAlign = "left";
      const width = context.measureText(`▸ ${policy}`).width + 12;
      const flips = x + width > picture.right;
      const at = flips ? x + 1 - width : x - 1;
      level = at < end ? level + 1 : 0; // below the one before, if that is in the way
      end = at + width;
      context.fillStyle = picture.ink;
      context.fillRect(x - 1, 0, 2, picture.height - AXIS);
      context.fillRect(at, LABEL * level, width, LABEL);
      context.fillStyle = picture.paper;
      context.fillText(flips ? `${policy} ▸` : `▸ ${policy}`, at + 6, LABEL * level + LABEL / 2);
    }
  }

  // Point at the step that the caption is about, and frame its slots.
  function drawCaption(picture, model, { n, slots }) {
    const index = model.indexOf(n);
    if (index < picture.from || index > picture.to || model.columns[index].n !== n) return;
    const { context } = picture;
    const x = picture.x0(index), width = Math.max(picture.x1(index) - x, 2), middle = x + width / 2;
    context.fillStyle = picture.ink;
    context.beginPath();
    context.moveTo(middle - 6, 0);
    context.lineTo(middle + 6, 0);
    context.lineTo(middle, TOP + 1);
    context.fill();
    context.strokeStyle = picture.ink;
    context.lineWidth = 2;
    for (const slot of slots) {
      if (slot < picture.rows) context.strokeRect(x - 1, TOP + slot * picture.tall, width + 2, picture.tall - 0.5);
    }
  }

  function drawArea(picture, { from, to, top, bottom }) {
    if (to < picture.from || from > picture.to) return;
    const { context } = picture;
    const x = picture.x0(Math.max(from, picture.from)), y = TOP + top * picture.tall;
    const width = picture.x1(Math.min(to, picture.to)) - x, height = (bottom - top + 1) * picture.tall;
    context.fillStyle = picture.ink;
    context.globalAlpha = 0.14;
    context.fillRect(x, y, width, height);
    context.globalAlpha = 1;
    context.strokeStyle = picture.ink;
    context.lineWidth = 1.5;
    context.strokeRect(x, y, width, height);
  }

  function drawHover(picture, { index, slot }) {
    if (index < picture.from || index > picture.to) return;
    const { context } = picture;
    const x = picture.x0(index), width = Math.max(picture.x1(index) - x, 1);
    context.fillStyle = picture.ink;
    context.globalAlpha = 0.1;
    context.fillRect(x, TOP, width, picture.height - AXIS - TOP);
    context.globalAlpha = 1;
    if (slot < 0) return;
    context.strokeStyle = picture.ink;
    context.lineWidth = 1.5;
    context.strokeRect(x - 0.5, TOP + slot * picture.tall, width + 1, picture.tall - 0.5);
  }

  Object.assign(EB, { drawMarks });
})(globalThis);
