// Server-sent events read with fetch, because EventSource cannot send a key. After a disconnect it resumes where it was,
// and it reports the state of the connection. What arrives is data and never becomes HTML.
"use strict";
(function (root) {
  const SILENCE = 25000; // ms; the server sends a comment at least every 10 s

  class Feed {
    // handlers: state, step, policy, arrival, departure, gap (data), status (name, text)
    constructor(url, handlers, { key = () => "", last = 600, crossOrigin = false } = {}) {
      this.url = url;
      this.handlers = handlers;
      this.key = key;
      this.last = last;
      this.crossOrigin = crossOrigin;
      this.id = null;
      this.run = null;
      this.stopped = false;
      this.delay = 300;
      this.loop();
    }

    stop() {
      this.stopped = true;
      this.control?.abort();
    }

    async loop() {
      while (!this.stopped) {
        try {
          await this.read();
          this.report("reconnecting", "The server closed the connection. Reconnecting…");
        } catch (error) {
          if (this.stopped) return;
          const text = error.status
            ? error.message
            : "The server cannot be reached. Reconnecting…";
          this.report(error.status === 401 ? "locked" : "reconnecting", text);
        }
        await new Promise((done) => (this.wake = setTimeout(done, this.delay)));
        this.delay = Math.min(this.delay * 1.7, 3000);
      }
    }

    report(name, text) {
      this.handlers.status?.(name, text);
    }

    async read() {
      this.control = new AbortController();
      const query = new URLSearchParams({ detail: "1", compact: "1", last: String(this.last) });
      const headers = { Accept: "text/event-stream" };
      if (this.id !== null && this.crossOrigin) query.set("after", this.id);
      else if (this.id !== null) headers["Last-Event-ID"] = String(this.id);
      if (this.key() && !this.crossOrigin) headers.Authorization = `Bearer ${this.key()}`;
      const answer = await fetch(`${this.url}/events?${query}`, {
        headers, cache: "no-store", signal: this.control.signal,
      });
      if (!answer.ok) throw await refusal(answer);
      this.delay = 300;
      const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
      let rest = "";
      for (;;) {
        const timer = setTimeout(() => this.control.abort(), SILENCE);
        const { value, done } = await reader.read().finally(() => clearTimeout(timer));
        if (done) return;
        const frames = (rest + value).split("\n\n");
        rest = frames.pop();
        for (const frame of frames) this.take(frame);
      }
    }

    take(frame) {
      let name = "step", data = "", id = null;
      for (const line of frame.split("\n")) {
        const at = line.indexOf(":");
        if (at <= 0) continue;
        const field = line.slice(0, at);
        const value = line.slice(at + 1).replace(/^ /, "");
        if (field === "event") name = value;
        else if (field === "data") data += value;
        else if (field === "id") id = Number(value);
      }
      if (!data) return;
      const value = JSON.parse(data);
      if (id !== null) this.id = id;
      if (name === "state") {
        this.report("live", "");
        if (this.run !== null && this.run !== value.run && this.id !== null) {
          // A new server process does not know our event number, so start over.
          this.id = null;
          this.run = value.run;
          this.handlers.state?.(value, true);
          this.control.abort();
          return;
        }
        const fresh = this.run !== value.run;
        this.run = value.run;
        this.handlers.state?.(value, fresh);
        return;
      }
      if (name === "step") this.members = value.members ??= this.members.map(next);
      this.handlers[name]?.(value);
    }
  }

  // A member in a step that repeats the one before.
  function next(member) {
    return member.phase === "held" ? member : { ...member, phase: "decode", tokens: 1, computed: member.computed + 1 };
  }

  async function refusal(answer) {
    let message = `The server answered ${answer.status}.`;
    try {
      const body = await answer.json();
      message = body.error.message || message;
    } catch {
      // not JSON: the status is enough
    }
    return Object.assign(new Error(message), { status: answer.status });
  }

  // Yield the events of a streamed answer.
  async function* events(answer) {
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const frames = (rest + value).split("\n\n");
      rest = frames.pop();
      for (const frame of frames) {
        if (frame.startsWith("data: ") && frame !== "data: [DONE]") yield JSON.parse(frame.slice(6));
      }
    }
  }

  root.EB = Object.assign(root.EB || {}, { Feed, refusal, events });
})(globalThis);
