// The buttons that send a load to this server, and its progress.
"use strict";
(function (root) {
  const EB = (root.EB = root.EB || {});
  const $ = (id) => document.getElementById(id);

  // headers(more) returns a request's headers with the API key.
  function setUp({ headers }) {
    let watching = null;

    $("load-form").addEventListener("submit", (event) => {
      event.preventDefault();
      send(Number($("load-rate").value));
    });
    $("burst").addEventListener("click", () => send(0));
    $("first-burst").addEventListener("click", () => {
      $("load-count").value = "40";
      send(0);
    });
    $("load-stop").addEventListener("click", () => fetch("load", { method: "DELETE", headers: headers({}) }));

    async function send(rate) {
      const number = (id, fallback) => Number($(id).value) || fallback;
      const load = {
        count: number("load-count", 200), rate, min_tokens: number("load-min", 8),
        max_tokens: number("load-max", 80), seed: Math.trunc(number("load-seed", 0)),
      };
      try {
        const reply = await fetch("load", {
          method: "POST",
          headers: headers({ "Content-Type": "application/json" }),
          body: JSON.stringify(load),
        });
        if (!reply.ok) throw await EB.refusal(reply);
        EB.showError("load-error", "");
        show(await reply.json());
        clearInterval(watching);
        watching = setInterval(watch, 500);
      } catch (error) {
        EB.showError("load-error", error.message);
      }
    }

    async function watch() {
      try {
        const reply = await fetch("load", { headers: headers({}) });
        if (reply.ok) show(await reply.json());
      } catch {
        clearInterval(watching); // the banner reports that the server is gone
      }
    }

    function show(load) {
      const failed = load.failed ? `, ${EB.count(load.failed)} rejected or failed` : "";
      EB.put("load-state", `${EB.count(load.done)} of ${EB.count(load.total)} answered${failed}`);
      $("load-stop").disabled = !load.active;
      $("poisson").disabled = $("burst").disabled = load.active;
      if (load.active) return;
      clearInterval(watching);
      document.dispatchEvent(new CustomEvent("load-ended", { detail: load }));
    }
  }

  Object.assign(EB, { setUpLoad: setUp });
})(globalThis);
