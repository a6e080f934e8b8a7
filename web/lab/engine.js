// Python in the background: starts its worker, asks it one question at a time, and stops what does not end. A second worker
// is loaded meanwhile, to take the place of one that may not go on. It knows neither the questions nor the page.
"use strict";
(function (root) {
  const EB = (root.EB = root.EB || {});
  const GRACE = 1000; // ms from the interrupt to the end of the worker
  const LONGEST = 120000; // ms after which an answer is stopped
  const SILENT = 5000; // ms without a word from Python after which it is: a hook does not return
  const SIGINT = 2;
  const STOPPED = "stopped. If you did not press Stop, a loop may never end";

  class Engine {
    // `changed` is called with "loading", "ready", "busy" or "failed".
    constructor(changed) {
      this.changed = changed;
      this.asked = 0;
      this.restarts = 0;
      this.spare = null;
      this.take(this.make());
    }

    make() {
      // A worker from a blob inherits the page's Content-Security-Policy; one from an address would have its host's, if any.
      const source = `import ${JSON.stringify(new URL("worker.js", location).href)};`;
      const address = URL.createObjectURL(new Blob([source], { type: "text/javascript" }));
      const worker = new Worker(address, { type: "module" });
      const python = { worker, isReady: false, isUsed: false, interrupt: null };
      python.ready = new Promise((resolve) => {
        worker.onerror = (event) => {
          event.preventDefault();
          if (python === this.spare) this.spare = null;
          if (python !== this.python) return;
          if (python.isReady) this.restart();
          else this.tell("failed");
          this.settle(JSON.stringify({ error: { line: null, words: `Python failed: ${event.message || "it cannot be loaded"}` } }));
        };
        worker.onmessage = ({ data }) => {
          if (data.ready) {
            python.isReady = true;
            URL.revokeObjectURL(address);
            if (root.crossOriginIsolated) {
              python.interrupt = new Uint8Array(new SharedArrayBuffer(1));
              worker.postMessage({ interrupt: python.interrupt });
            }
            if (python === this.python && !this.pending) this.tell("ready");
            resolve();
          } else if (python === this.python && this.pending) {
            if (data.alive) this.hear();
            else if (data.id === this.pending.id) this.settle(data.text);
          }
        };
      });
      return python;
    }

    take(python) {
      this.python = python;
      this.tell(python.isReady ? "ready" : "loading");
    }

    tell(state) {
      this.state = state;
      this.changed(state);
    }

    // Answer a question with the worker's text. `fresh`: by a worker that no question before `taints`: a user's code could have
    // changed there what the next is graded by.
    async ask(question, { fresh = false, taints = true } = {}) {
      if (this.pending) throw new Error("a question is being answered");
      const asked = (this.pending = { id: ++this.asked });
      const text = new Promise((resolve) => (asked.resolve = resolve));
      if (fresh && this.python.isUsed) this.restart();
      await Promise.race([this.python.ready, text]);
      if (this.pending === asked) {
        const { worker, interrupt } = this.python;
        this.python.isUsed ||= taints;
        this.tell("busy");
        if (interrupt) interrupt[0] = 0;
        asked.longest = setTimeout(() => this.stop(), LONGEST);
        this.hear();
        worker.postMessage({ id: asked.id, request: JSON.stringify(question) });
      }
      return text;
    }

    // Python computes a step, so no hook keeps it.
    hear() {
      clearTimeout(this.pending.silent);
      this.pending.silent = setTimeout(() => this.stop(), SILENT);
    }

    settle(text) {
      const asked = this.pending;
      if (!asked) return;
      for (const timer of [asked.longest, asked.silent, asked.grace]) clearTimeout(timer);
      this.pending = null;
      if (this.state === "busy") this.tell("ready");
      if (this.python.isUsed) this.spare ??= this.make();
      asked.resolve(text);
    }

    // Interrupt Python; where that cannot be, or does not help (a loop within C, or one that catches everything), end the worker.
    stop() {
      if (!this.pending) return;
      if (!this.python.interrupt || this.state !== "busy") this.end();
      else {
        this.python.interrupt[0] = SIGINT;
        this.pending.grace ??= setTimeout(() => this.end(), GRACE);
      }
    }

    end() {
      this.restart();
      this.settle(JSON.stringify({ error: { line: null, words: STOPPED } }));
    }

    restart() {
      this.python.worker.terminate();
      this.restarts++;
      this.take(this.spare ?? this.make());
      this.spare = null;
    }
  }

  Object.assign(EB, { Engine });
})(globalThis);
