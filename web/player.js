// Which step of a run is shown. A cursor marks it: live it is the newest step, and after a pause, a step back, at low speed
// and in a replay an earlier one. It draws nothing.
"use strict";
(function (root) {
  const EB = (root.EB = root.EB || {});

  class Player {
    // `changed` is called when playing starts or stops.
    constructor(live, changed) {
      this.live = live;
      this.changed = changed;
      this.model = live; // or the model of a replayed file
      this.cursor = -1; // the number of the step shown; -1 is the newest
      this.playing = true;
      this.speed = 1;
      this.playhead = 0; // the moment of the run shown while it is slowed or replayed
    }

    get isLive() {
      return this.model === this.live;
    }

    get follows() {
      return this.isLive && this.cursor < 0;
    }

    get index() {
      return this.cursor < 0 ? this.model.columns.length - 1 : this.model.indexOf(this.cursor);
    }

    get column() {
      return this.model.columns[this.index];
    }

    moveTo(n) {
      this.cursor = n;
      if (this.column) this.playhead = this.column.end;
    }

    // Show another model from its start, or the live one at its end.
    open(model) {
      this.model = model;
      this.playing = true;
      if (this.isLive) this.cursor = -1;
      else this.moveTo(model.columns[0].n);
      this.changed();
    }

    play(on) {
      const { model } = this;
      if (!on && this.cursor < 0 && model.last) this.moveTo(model.last.n);
      if (on && this.isLive && this.speed >= 1) this.cursor = -1;
      if (on && !this.isLive && this.cursor >= model.last.n) this.moveTo(model.columns[0].n);
      this.playing = on;
      this.changed();
    }

    step(by) {
      const { columns } = this.model;
      if (!columns.length) return;
      if (this.playing) this.play(false);
      this.moveTo(columns[Math.max(0, Math.min(columns.length - 1, this.index + by))].n);
    }

    // Slower than 1, the live run is followed from here with a growing delay.
    setSpeed(speed) {
      this.speed = speed;
      if (this.isLive && this.model.last) {
        if (speed < 1 && this.cursor < 0) this.moveTo(this.model.last.n);
        if (speed >= 1 && this.playing) this.cursor = -1;
      }
      this.changed();
    }

    // Move on by `elapsed` seconds of the viewer's time.
    advance(elapsed) {
      const { model } = this;
      if (!this.playing || this.follows || !model.last) return;
      this.playhead = Math.max(this.playhead, model.columns[0].t) + elapsed * this.speed;
      const index = model.indexAt(this.playhead);
      if (index >= 0) this.cursor = model.columns[index].n;
      if (this.playhead < model.last.end) return;
      if (this.isLive) {
        this.cursor = this.speed < 1 ? model.last.n : -1;
        this.playhead = model.last.end;
      } else {
        this.cursor = model.last.n;
        this.play(false);
      }
    }
  }

  Object.assign(EB, { Player });
})(globalThis);
