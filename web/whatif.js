// What other policies would have made of the requests that the server has just served: asks the server, and shows the answer as
// lanes on one clock. The figures are shown by card.js.
"use strict";
(function (root) {
  const EB = (root.EB = root.EB || {});
  const SHOWN_FOR = 10; // seconds that the lanes take to run through

  // Ask POST /what-if. Throw an error with the server's words.
  async function ask(question, headers) {
    const reply = await fetch("what-if", {
      method: "POST",
      headers: headers({ "Content-Type": "application/json" }),
      body: JSON.stringify(question),
    });
    if (!reply.ok) throw await EB.refusal(reply);
    return reply.json();
  }

  // Return each step of records that stand for `repeat` equal ones, with the requests' ids in place of their numbers.
  function steps(records, requests) {
    const id = (name) => requests[name]?.id ?? name;
    return records.flatMap(({ repeat, ...record }) => Array.from({ length: repeat }, (_, k) => ({
      ...record,
      n: record.n + k,
      t: record.t + k * record.seconds,
      members: record.members.map((member) => ({ ...member, id: id(member.id), computed: member.computed + k * member.tokens })),
      joined: k ? [] : record.joined.map(id),
      // Requests from before are drawn while they run, but they are not among those that are counted.
      left: k < repeat - 1 ? [] : record.left.filter((gone) => requests[gone.id]).map((gone) => ({ ...gone, id: id(gone.id) })),
      ...(record.displaced ? { displaced: k ? [] : record.displaced.map(id) } : {}),
    })));
  }

  // What sets a lane apart from others of its policy.
  function nameOf(lane, answer) {
    if (lane.measured) return "as served";
    if (answer.error && lane === answer.lanes[1]) return "the same, simulated";
    return ["simulated", ...Object.entries(lane.options ?? {}).map(([option, value]) => `${option} ${value}`)].join(", ");
  }

  // The runs of an answer, as a file of recorded runs has them.
  function runsOf(answer) {
    // Calls of programs come when their parents were answered, which differs by lane.
    const arrivals = (lane) => answer.requests.map((request, k) => ({
      id: request.id, t: lane.arrived?.[k] ?? request.t, prompt_tokens: request.prompt_tokens, max_tokens: request.output_tokens,
    }));
    return answer.lanes.map((lane) => ({
      policy: lane.policy, name: `${lane.policy}, ${nameOf(lane, answer)}`, arrivals: arrivals(lane), departures: [],
      records: steps(lane.records, answer.requests), cut: answer.cut_s,
    }));
  }

  // Give the requests the numbers that the live picture has for them, if it knows them all.
  function numbersOf(answer, live) {
    const known = answer.requests.map(({ id }) => live.numbers.get(id));
    return new Map(answer.requests.map(({ id }, k) => [id, known.every(Boolean) ? known[k] : k + 1]));
  }

  // The lanes of an answer, which run through once and can then be moved.
  class LaneShow {
    constructor(box) {
      this.box = box;
      const bar = box.appendChild(EB.element("div", "bar"));
      this.button = bar.appendChild(EB.element("button", "", "Run again"));
      this.button.type = "button";
      const label = bar.appendChild(EB.element("label", "grow", "time "));
      this.seek = label.appendChild(EB.element("input"));
      Object.assign(this.seek, { type: "range", min: "0", step: "any" });
      this.time = label.appendChild(EB.element("output"));
      this.note = box.appendChild(EB.element("p", "sub"));
      this.list = box.appendChild(EB.element("div", "lanes"));
      this.lanes = [];
      this.clock = 0;
      this.length = 1;
      this.before = performance.now();
      this.button.addEventListener("click", () => (this.playing ? this.pause() : this.run()));
      this.seek.addEventListener("input", () => {
        this.pause();
        this.clock = Number(this.seek.value);
      });
      EB.onTheme(() => {
        for (const lane of this.lanes) lane.picture.restyle();
        this.drawn = null;
      });
      this.frame(this.before);
    }

    // Show the lanes of an answer; `live` is the model of the live picture.
    show(answer, live) {
      this.list.replaceChildren();
      const numbers = numbersOf(answer, live);
      this.lanes = runsOf(answer).map((run, k) => {
        const model = EB.modelOf(run, numbers);
        const lane = new EB.Lane(this.list, nameOf(answer.lanes[k], answer), model, Math.min(0, run.records[0]?.t ?? 0));
        return Object.assign(lane, { cut: run.cut });
      });
      EB.levelLanes(this.lanes);
      for (const lane of this.lanes) {
        lane.prepare();
        lane.total = answer.requests.length;
      }
      this.length = Math.max(0.01, ...this.lanes.map((lane) => lane.seconds));
      this.seek.max = String(this.length);
      this.drawn = null;
      EB.put(this.note, answer.cut_s
        ? `The first ${EB.seconds(answer.cut_s)} of each lane; the figures above are of all of it.`
        : "A number is a request, the same in every lane; colors repeat. Hatched cells are held: finished, waiting for the rest of the batch.");
      this.box.hidden = false;
      this.run();
    }

    run() {
      this.clock = 0;
      this.playing = true;
      EB.put(this.button, "Stop");
    }

    pause() {
      this.playing = false;
      EB.put(this.button, "Run again");
    }

    frame(now) {
      requestAnimationFrame((at) => this.frame(at));
      const elapsed = Math.min(0.25, (now - this.before) / 1000);
      this.before = now;
      if (this.box.hidden) return;
      if (this.playing) {
        this.clock = Math.min(this.length, this.clock + (elapsed * this.length) / SHOWN_FOR);
        if (this.clock >= this.length) this.pause();
      }
      const stamp = [this.clock, this.list.clientWidth].join();
      if (stamp === this.drawn) return;
      this.drawn = stamp;
      for (const lane of this.lanes) lane.draw(this.clock, this.length * 1.02);
      this.seek.value = String(this.clock);
      EB.put(this.time, EB.seconds(this.clock));
    }

    hide() {
      this.pause();
      this.box.hidden = true;
    }
  }

  EB.whatIf = { ask, runsOf, nameOf, LaneShow };
})(globalThis);
