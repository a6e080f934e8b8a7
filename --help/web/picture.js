// Draws a model: a row is a slot, a column a step or a slice of time, a color a request; the queue is below. A cell's
// kind also shows in its shape, so that the picture does not depend on color.
"use strict";
(function (root) {
  const EB = (root.EB = root.EB || {});
  const { KIND, JOINED, HIT, LEFT } = EB;
  const GUTTER = 42, RIGHT = 10, TOP = 6, QUEUE = 44, AXIS = 18, SPACE = 10, NOTE = 16;
  const APART = 160; // pixels between two words "held", of which one to a region is enough

  class Picture {
    constructor(canvas, { height = 420, queue = true } = {}) {
      this.canvas = canvas;
      this.wanted = height;
      this.queue = queue;
      this.context = canvas.getContext("2d");
      this.rows = 0;
      this.most = 4;
      this.cells = 0;
      this.restyle();
    }

    // Read the page's colors again: the theme may have changed.
    restyle() {
      Object.assign(this, EB.paintsOf(this.canvas, this.context));
    }

    // Show the rows in use in the columns from..to, and a few more. Fewer rows are shown once half of them are unused, so that
    // the picture does not jump with every request.
    fitRows(model, from, to) {
      let used = 0;
      for (let i = from; i <= to; i++) {
        const column = model.columns[i];
        for (let slot = column.slots - 1; slot >= used; slot--) {
          if (column.who[slot]) used = slot + 1;
        }
      }
      const slots = Math.max(model.slots, 1);
      const wanted = Math.min(slots, Math.max(8, Math.ceil((used + 1) / 4) * 4));
      const kept = Math.min(this.rows, slots);
      this.rows = slots - wanted <= 4 ? slots : wanted > kept || wanted <= kept / 2 ? wanted : kept;
    }

    // The height of all but the rows.
    get around() {
      return TOP + AXIS + (this.queue ? SPACE + QUEUE : 0);
    }

    resize(model, width) {
      const hidden = model.slots > this.rows;
      const tall = Math.max(5, Math.min(40, Math.floor(this.wanted / Math.max(this.rows, 1))));
      const height = tall * this.rows + (hidden ? NOTE : 0) + this.around;
      const ratio = root.devicePixelRatio || 1;
      if (width !== this.width || height !== this.height || ratio !== this.ratio) {
        if (ratio !== this.ratio && this.ratio) this.restyle();
        this.width = width;
        this.height = height;
        this.ratio = ratio;
        this.canvas.width = Math.round(width * ratio);
        this.canvas.height = Math.round(height * ratio);
        this.canvas.style.height = `${height}px`;
      }
      this.tall = tall;
      this.hidden = hidden;
      this.bottom = TOP + tall * this.rows;
    }

    // Position the columns. view = {index, zoom (pixels per step), time (pixels per second, 0: by steps), at, hover, the numbers
    // of the requests selected and own}
    place(model, view, width) {
      const right = width - RIGHT;
      const left = GUTTER;
      const { columns } = model;
      const index = Math.max(0, Math.min(view.index, columns.length - 1));
      if (view.time) {
        const end = Math.max(view.at ?? 0, columns[index].end);
        const at = (t) => right - (end - t) * view.time;
        let from = index;
        while (from > 0 && at(columns[from - 1].end) > left) from--;
        this.x0 = (i) => at(columns[i].t);
        this.x1 = (i) => Math.max(at(columns[i].end), at(columns[i].t) + 0.75);
        this.from = from;
        this.timeAt = at;
        this.span = { end, seconds: (right - left) / view.time };
      } else {
        const zoom = view.zoom;
        const count = Math.floor((right - left) / zoom);
        // Until the picture is full it grows from the left.
        const base = index + 1 >= count ? right - (index + 1) * zoom : left;
        this.from = Math.max(0, index - count + 1);
        this.x0 = (i) => base + i * zoom;
        this.x1 = (i) => base + (i + 1) * zoom;
      }
      this.to = index;
      this.left = left;
      this.right = right;
    }

    draw(model, view) {
      const { context } = this;
      this.model = model;
      if (!model.columns.length) {
        this.rows = 0;
        return;
      }
      const width = Math.max(200, this.canvas.clientWidth);
      this.place(model, view, width);
      this.fitRows(model, this.from, this.to);
      this.resize(model, width);
      context.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
      context.fillStyle = this.paper;
      context.fillRect(0, 0, this.width, this.height);
      this.drawTracks(model, view.hover?.slot ?? -1);
      context.save();
      context.beginPath();
      context.rect(this.left, 0, this.right - this.left, this.height);
      context.clip();
      this.cells = 0;
      this.held = []; // where the word "held" is written
      const selected = this.shows(model, view.selected) ? view.selected : 0;
      for (let slot = 0; slot < this.rows; slot++) this.drawRow(model, slot, { ...view, selected });
      this.drawGrid(view);
      this.drawEngines(model);
      if (this.queue) this.drawQueue(model);
      EB.drawMarks(this, model, view);
      context.restore();
      this.drawAxis(model, view);
    }

    // Whether a request is in one of the columns drawn; only then do the others fade.
    shows(model, number) {
      const request = model.requests.get(number), { columns } = model;
      return request !== undefined && request.joinedAt > 0 && request.joinedAt <= columns[this.to].n && request.seen >= columns[this.from].n;
    }

    drawTracks(model, pointed) {
      const { context, tall } = this;
      context.font = `10px ${this.font}`;
      context.textBaseline = "middle";
      context.textAlign = "right";
      const every = tall >= 13 ? 1 : tall >= 8 ? 2 : 4;
      for (let slot = 0; slot < this.rows; slot++) {
        const y = TOP + slot * tall;
        context.fillStyle = slot === pointed ? this.line : this.track;
        context.fillRect(this.left, y + 0.5, this.right - this.left, tall - 1.5);
        if (slot % every === 0 || slot === pointed) {
          context.fillStyle = slot === pointed ? this.ink : this.faint;
          context.fillText(String(slot), GUTTER - 7, y + tall / 2);
        }
      }
      if (this.hidden) {
        context.textAlign = "left";
        context.fillStyle = this.faint;
        const text = `slots ${this.rows} to ${model.slots - 1}: idle, not drawn`;
        context.fillText(text, this.left, this.bottom + NOTE / 2 + 1);
      }
    }

    // Where several engines share the slots, a line above the first slot of each, and its name.
    drawEngines(model) {
      const { context, tall } = this;
      context.font = `10px ${this.font}`;
      context.textAlign = "left";
      for (const [first, name] of model.engines) {
        if (first >= this.rows) continue;
        const y = TOP + first * tall;
        context.fillStyle = this.ink;
        if (first) context.fillRect(this.left, y - 1, this.right - this.left, 1.5);
        if (!name) continue;
        context.fillStyle = this.paper;
        context.fillRect(this.left, y + 1, context.measureText(name).width + 6, 12);
        context.fillStyle = this.ink;
        context.fillText(name, this.left + 3, y + 7);
      }
    }

    // Draw a row as runs of equal cells: a decode of 40 steps is one rectangle.
    drawRow(model, slot, view) {
      const { columns } = model;
      let start = -1;
      for (let i = this.from; i <= this.to; i++) {
        const column = columns[i];
        const kind = slot < column.slots ? column.kind(slot) : KIND.IDLE;
        if (start >= 0 && !this.continues(columns, start, i, slot, kind)) {
          this.drawRun(model, slot, start, i - 1, view);
          start = -1;
        }
        if (start < 0 && kind !== KIND.IDLE) start = i;
      }
      if (start >= 0) this.drawRun(model, slot, start, this.to, view);
    }

    continues(columns, start, i, slot, kind) {
      const a = columns[start], b = columns[i];
      if (kind === KIND.IDLE || kind !== a.kind(slot) || b.who[slot] !== a.who[slot]) return false;
      // A request also stays in its slot between steps, so the engine's overhead is not drawn as a gap.
      return b.part(slot) === a.part(slot) && !b.has(slot, JOINED);
    }

    drawRun(model, slot, first, last, view) {
      const { context, tall } = this;
      const column = model.columns[first];
      const kind = column.kind(slot);
      const fill = this.fills[Math.max(0, model.requests.get(column.who[slot])?.hue ?? 0)];
      const y = TOP + slot * tall + 0.5, height = tall - 1.5;
      const x = this.x0(first), width = Math.max(this.x1(last) - x, 0.75);
      const { selected, lit } = view;
      const isLit = selected ? column.who[slot] === selected : !lit || lit(model.requests.get(column.who[slot]));
      context.globalAlpha = isLit ? 1 : 0.38;
      this.cells += last - first + 1;
      if (kind === KIND.PREFILL) {
        context.fillStyle = fill.prefill;
        context.fillRect(x, y, width, height);
      } else if (kind === KIND.DECODE) {
        const inset = tall >= 8 ? Math.round(tall * 0.16) : 0.5;
        context.fillStyle = fill.decode;
        context.fillRect(x, y + inset, width, height - 2 * inset);
      } else if (kind === KIND.HELD) {
        context.fillStyle = fill.held;
        context.fillRect(x, y, width, height);
      } else {
        context.fillStyle = fill.decode;
        context.fillRect(x, y + height / 2 - 1, width, 2);
      }
      const part = column.part(slot);
      if (part > 0.01) {
        context.fillStyle = this.paper;
        context.fillRect(x, y, width, height * part);
        context.fillStyle = fill.dots;
        context.fillRect(x, y, width, height * part);
      }
      if (column.has(slot, JOINED) && (width > 5 || view.zoom >= 3)) {
        context.fillStyle = fill.edge;
        context.fillRect(x, y, Math.min(2, width), height);
        if (column.has(slot, HIT)) this.drawHit(x, y + height / 2, Math.min(5, height / 2));
      }
      if (model.columns[last].has(slot, LEFT) && width > 5) {
        context.fillStyle = fill.edge;
        context.fillRect(x + width - 1.5, y, 1.5, height);
      }
      if (kind === KIND.DECODE) this.drawName(`#${column.who[slot]}`, fill.label, { x, y, width, height });
      else if (kind === KIND.HELD) this.drawName("held", this.ink, { x, y, width, height }, true);
      context.globalAlpha = 1;
      if (column.who[slot] === view.own) {
        context.fillStyle = this.ink;
        for (const edge of [y - 1, y + height - 1]) context.fillRect(x, edge, width, 2);
        if (column.has(slot, JOINED)) context.fillRect(x, y, 2, height);
        if (model.columns[last].has(slot, LEFT)) context.fillRect(x + width - 2, y, 2, height);
      }
    }

    // Write into a run of cells, where it fits; on hatching with plain ground behind it.
    drawName(text, color, { x, y, width, height }, isHatched = false) {
      const { context, tall } = this;
      if (tall < 12 || width <= 34 || x + width < this.left + 34) return;
      context.font = `600 ${Math.min(tall > 24 ? 14 : 11, tall - 4)}px ${this.font}`;
      context.textAlign = "left";
      const at = Math.max(x, this.left) + 5;
      if (isHatched) {
        const wide = context.measureText(text).width;
        if (at + wide + 5 > x + width || this.held.some((other) => Math.abs(other - at) < APART)) return;
        this.held.push(at);
        context.fillStyle = this.paper;
        context.fillRect(at - 3, y + height / 2 - Math.min(9, height / 2), wide + 6, Math.min(18, height));
      }
      context.fillStyle = color;
      context.fillText(text, at, y + height / 2 + 0.5);
    }

    // A diamond: a part of the prompt came from the prefix cache.
    drawHit(x, y, size) {
      const { context } = this;
      context.beginPath();
      context.moveTo(x + 1, y);
      context.lineTo(x + 1 + size, y - size);
      context.lineTo(x + 1 + 2 * size, y);
      context.lineTo(x + 1 + size, y + size);
      context.closePath();
      context.fillStyle = "#ffffff";
      context.fill();
      context.strokeStyle = "#10151b";
      context.lineWidth = 1;
      context.stroke();
    }

    drawGrid(view) {
      if (view.time || view.zoom < 7) return;
      const { context } = this;
      context.fillStyle = this.paper;
      context.globalAlpha = 0.55;
      for (let i = this.from; i <= this.to; i++) {
        context.fillRect(this.x1(i) - 1, TOP, 1, this.bottom - TOP);
      }
      context.globalAlpha = 1;
    }

    drawQueue(model) {
      const { context } = this;
      const floor = this.height - AXIS;
      let most = 4;
      for (let i = this.from; i <= this.to; i++) most = Math.max(most, model.columns[i].queue);
      this.most = most;
      context.fillStyle = this.track;
      context.fillRect(this.left, floor - QUEUE, this.right - this.left, QUEUE);
      context.fillStyle = this.queueInk;
      let x = -1, tallest = 0;
      for (let i = this.from; i <= this.to; i++) {
        const { queue } = model.columns[i];
        const x0 = this.x0(i), next = i < this.to && model.columns[i + 1].queue > 0;
        const x1 = next ? this.x0(i + 1) : this.x1(i);
        if (x1 - x < 0.7 && queue <= tallest) continue; // skip columns narrower than a pixel
        tallest = queue;
        x = x1;
        const height = (queue / most) * (QUEUE - 3);
        if (height > 0) context.fillRect(x0, floor - height, Math.max(x1 - x0 + (next ? 0.3 : 0), 0.8), height);
      }
    }

    drawAxis(model, view) {
      const { context } = this;
      const y = this.height - AXIS / 2 + 1;
      context.font = `10px ${this.font}`;
      context.fillStyle = this.faint;
      context.textAlign = "right";
      if (this.queue) {
        const floor = this.height - AXIS;
        context.fillText(EB.count(this.most), GUTTER - 7, floor - QUEUE + 6);
        context.fillText("0", GUTTER - 7, floor - 5);
        context.save();
        context.translate(8, floor - QUEUE / 2);
        context.rotate(-Math.PI / 2);
        context.textAlign = "center";
        context.fillText("queue", 0, 0);
        context.restore();
      }
      context.save();
      context.translate(8, (TOP + this.bottom) / 2);
      context.rotate(-Math.PI / 2);
      context.textAlign = "center";
      context.fillText("slot", 0, 0);
      context.restore();
      context.textAlign = "center";
      if (view.time) this.ticksOfTime(y, view);
      else this.ticksOfSteps(model, y);
    }

    ticksOfSteps(model, y) {
      const { columns } = model;
      let last = -Infinity;
      const step = nice((70 * (this.to - this.from + 1)) / Math.max(this.x1(this.to) - this.x0(this.from), 1));
      for (let i = this.from; i <= this.to; i++) {
        const x = (this.x0(i) + this.x1(i)) / 2;
        if (columns[i].n % step || x - last < 46 || x < this.left + 12 || x > this.right - 14) continue;
        this.context.fillText(EB.count(columns[i].n), x, y);
        last = x;
      }
    }

    ticksOfTime(y, view) {
      const step = nice(80 / view.time, true);
      const origin = view.origin ?? 0;
      const end = this.span.end - origin;
      for (let k = Math.floor(end / step); k >= 0 && k * step > end - this.span.seconds; k--) {
        const x = this.timeAt(k * step + origin);
        if (x < this.left + 12 || x > this.right - 14) continue;
        const digits = step < 0.1 ? 2 : step < 1 ? 1 : 0;
        this.context.fillText(`${(k * step).toFixed(digits)} s`, x, y);
      }
    }

    // The cell under a point of the canvas, or null.
    hit(x, y) {
      const { model } = this;
      if (!model || !model.columns.length || x < this.left || x > this.right) return null;
      let low = this.from, high = this.to;
      while (low < high) {
        const middle = (low + high + 1) >> 1;
        if (this.x0(middle) <= x) low = middle;
        else high = middle - 1;
      }
      if (x > this.x1(low) + 2) return null;
      const slot = Math.floor((y - TOP) / this.tall);
      return { index: low, slot: slot >= 0 && slot < this.rows ? slot : -1 };
    }
  }

  // The smallest of 1, 2, 5, 10, 20, ... that is not below the value.
  function nice(value, fractions = false) {
    const least = Math.max(value, fractions ? 0.01 : 1);
    const power = 10 ** Math.floor(Math.log10(least));
    return [1, 2, 5, 10].map((k) => k * power).find((k) => k >= least * 0.999);
  }

  Object.assign(EB, { TOP, AXIS, Picture });
})(globalThis);
