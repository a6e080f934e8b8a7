// Puts the story on the page: the menu behind the policy's badge, the line of captions above the picture, and the tour.
// The live page calls `tick` and asks what to mark in the picture; nothing here knows how that is drawn.
"use strict";
(function (root) {
  const EB = (root.EB = root.EB || {});
  const $ = (id) => document.getElementById(id);
  const EVERY = 100; // ms between two looks at the newest step
  const SLOW = 1.5; // seconds of a step on the page from which each step gets its caption

  // headers(more) returns a request's headers with the API key; live is the model of this server; facts() its state; axis(name)
  // sets what a column of the picture shows, and returns what it showed.
  function setUpStory({ headers, live, facts, axis }) {
    const narrator = new EB.Narrator();
    const tour = new EB.Tour({
      box: $("story"), opener: $("tour-open"), headers, live,
      slots: () => facts().slots || live.slots || 8, isShared: () => !facts().demo, axis,
    });
    new EB.PolicyMenu($("policy"), $("policy-menu"), headers, () => facts().queues);
    let at = 0, measured = 0, shown = false, invited = false;

    function show(on) {
      shown = on;
      $("captions").setAttribute("aria-pressed", String(on));
      $("caption").hidden = !on;
      narrator.clear();
    }
    $("captions").addEventListener("click", () => show(!shown));

    // The server is known, or another process took its place: a demonstration opens with captions and an invitation to the tour.
    async function ready() {
      if (tour.stop) {
        tour.close(); // the server has been restarted
        invited = false;
      }
      if (facts().demo && !invited) {
        invited = true;
        show(true);
        if ($("story").hidden) tour.invite();
      }
      if (EB.Tour.named >= 0 && !tour.stop) {
        tour.invite(); // the address is a link to a stop
        tour.begin(EB.Tour.named);
      }
      try {
        narrator.closed = new Set((await EB.readPolicies(headers)).closed);
      } catch {
        // without the list of closed loops, the captions say less
      }
    }

    // Look at the step that the player shows.
    function tick({ model, index, column, playing, speed }, now) {
      if (now - at < EVERY) return;
      tour.pass(Math.min(now - at, 1000) / 1000);
      at = now;
      if (now - measured > 500) {
        measured = now;
        tour.refresh();
      }
      if (!shown) return;
      const exact = !playing || (column && column.seconds / speed > SLOW);
      const caption = narrator.at(model, index, now / 1000, exact);
      EB.put("caption-step", caption ? `step ${EB.count(caption.n)}` : "");
      EB.put("caption-text", caption?.text ?? "");
      const spoken = narrator.announce(now / 1000);
      if (spoken) EB.put("caption-live", spoken);
    }

    return {
      ready, tick,
      get mark() { return shown ? narrator.shown : null; },
      get lit() { return tour.lit; },
      narrator, tour,
    };
  }

  Object.assign(EB, { setUpStory });
})(globalThis);
