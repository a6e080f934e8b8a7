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
      if (isValid()) send(Number($("load-rate").value));
    });
    $("burst").addEventListener("click", () => isValid() && send(0));
    $("first-burst").addEventListener("click", () => {
      $("load-count").value = "40";
      if (isValid()) send(0);
    });
    $("load-stop").addEventListener("click", () => fetch("load", { method: "DELETE", headers: headers({}) }));

    const number = (id) => Number($(id).value);

    // The browser says beside the field what is wrong. The form has novalidate, so that this is asked for every button.
    function isValid() {
      const swapped = number("load-min") > number("load-max");
      $("load-min").setCustomValidity(swapped ? "The first must not exceed the second." : "");
      return $("load-form").reportValidity();
    }

    async function send(rate) {
      const load = {
        count: number("load-count"), rate, min_tokens: number("load-min"), max_tokens: number("load-max"), seed: number("load-seed"),
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
      $("load-stop").title = load.active ? "" : "no load is running";
      for (const id of ["poisson", "burst"]) {
        $(id).disabled = load.active;
        $(id).title = load.active ? "a load is running: wait, or stop it" : "";
      }
      if (load.active) return;
      clearInterval(watching);
      document.dispatchEvent(new CustomEvent("load-ended", { detail: load }));
    }
  }

  Object.assign(EB, { setUpLoad: setUp });
})(globalThis);
