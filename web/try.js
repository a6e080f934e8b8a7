// The prompt box. A model with a chat template gets what the box holds as a message.
"use strict";
(function (root) {
  const EB = (root.EB = root.EB || {});
  const $ = (id) => document.getElementById(id);

  // headers(more) returns a request's headers with the API key; sent(id) is called when this page sends a request.
  function setUp({ headers, sent }) {
    const answer = $("answer");
    answer.classList.add("none");
    let control = null;
    let chats = false;

    // Fit the box to the served model, unless the user has written in it.
    function ask(asChat) {
      const box = $("prompt");
      const untouched = box.value === box.defaultValue;
      chats = asChat;
      box.defaultValue = chats ? "What is the capital of France?" : "ROMEO:";
      if (untouched) box.value = box.defaultValue;
      EB.put("prompt-label", chats ? "Message" : "Prompt");
    }

    $("cancel").addEventListener("click", () => control?.abort());
    $("prompt").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("prompt-form").requestSubmit();
    });
    $("prompt-form").addEventListener("submit", async (event) => {
      event.preventDefault();
      const prompt = $("prompt").value;
      const tokens = Number($("tokens").value) || 40;
      // Greedy, because small chat models often answer nonsense at temperature 1.
      const [path, body] = chats
        ? ["v1/chat/completions", { messages: [{ role: "user", content: prompt }], max_tokens: tokens, temperature: 0 }]
        : ["inference", { prompt, num_tokens: tokens }];
      const id = `page-${Array.from(crypto.getRandomValues(new Uint32Array(2)), (n) => n.toString(36)).join("")}`;
      control = new AbortController();
      $("send").disabled = true;
      $("cancel").disabled = false;
      answer.classList.remove("none");
      answer.textContent = chats ? `${prompt}\n\n` : prompt;
      EB.showError("answer-error", "");
      sent(id);
      try {
        const reply = await fetch(path, {
          method: "POST",
          signal: control.signal,
          headers: headers({ "Content-Type": "application/json", "X-Request-Id": id }),
          body: JSON.stringify({ ...body, stream: true }),
        });
        if (!reply.ok) throw await EB.refusal(reply);
        for await (const piece of EB.events(reply)) {
          if (piece.error) throw new Error(piece.error.message);
          answer.append(piece.choices?.[0]?.delta.content || piece.text || ""); // a text node
          answer.scrollTop = answer.scrollHeight;
        }
      } catch (error) {
        if (control.signal.aborted) answer.append(" [stopped]");
        else EB.showError("answer-error", error.message);
      } finally {
        $("send").disabled = false;
        $("cancel").disabled = true;
      }
    });

    return { ask };
  }

  Object.assign(EB, { setUpTry: setUp });
})(globalThis);
