// Acceptance with the official `openai` package of Node: parse, streams of tool calls, its tool runner, responses.
// usage: NODE_PATH=FOLDER/node_modules node agent_openai_node.cjs BASE_URL

const OpenAI = require("openai");

const base = process.argv[2];
const client = new OpenAI({ baseURL: `${base}/v1`, apiKey: "sk-anything", maxRetries: 0 });
const failed = [];
let passed = 0;

const ok = (name, right, detail) => {
  if (right) passed += 1;
  else failed.push(name);
  console.log(right ? `  PASS ${name}` : `  FAIL ${name}: ${JSON.stringify(detail)?.slice(0, 900)}`);
};
const step = async (name, run) => {
  try {
    await run();
  } catch (error) {
    ok(`${name} runs`, false, String(error));
  }
};

const animal = {
  type: "object",
  properties: { kind: { enum: ["cat", "dog"] }, legs: { type: "integer" } },
  required: ["kind", "legs"],
  additionalProperties: false,
};
const isAnimal = (value) => ["cat", "dog"].includes(value?.kind) && Number.isInteger(value.legs);
const parameters = {
  type: "object",
  properties: { city: { enum: ["Oslo", "Rome"] } },
  required: ["city"],
  additionalProperties: false,
};
const task = [{ role: "user", content: "How warm is it in Oslo, and how many people live there? Use the tools." }];

const main = async () => {
  const model = (await client.models.list()).data[0].id;
  console.log(`== openai-node against ${base} model=${model}`);
  const called = [];
  const tool = (name, result) => ({
    type: "function",
    function: {
      name,
      description: `Return the ${name} of a city.`,
      parameters,
      parse: JSON.parse,
      function: ({ city }) => (called.push([name, city]), `${city}: ${result}`),
    },
  });
  const tools = [tool("temperature", "20 degrees"), tool("population", "700000 people")];
  const ended = (name, answer) => {
    ok(`${name} calls a tool`, called.length && called.every(([, city]) => ["Oslo", "Rome"].includes(city)), called);
    ok(`${name} ends with a text`, typeof answer === "string" && answer.trim(), answer);
    called.length = 0;
  };

  await step("form", async () => {
    const format = { type: "json_schema", json_schema: { name: "animal", strict: true, schema: animal } };
    const asked = { model, messages: [{ role: "user", content: "Describe an animal." }], max_tokens: 200 };
    const whole = await client.chat.completions.parse({ ...asked, response_format: format });
    ok("response_format", isAnimal(JSON.parse(whole.choices[0].message.content)), whole);
    const streamed = await client.chat.completions.stream({ ...asked, response_format: format }).finalContent();
    ok("response_format in a stream", isAnimal(JSON.parse(streamed)), streamed);
    const text = { format: { type: "json_schema", name: "animal", strict: true, schema: animal } };
    const response = await client.responses.parse({ model, input: "Describe an animal.", text, store: false });
    ok("responses with a format", isAnimal(JSON.parse(response.output_text)), response);
  });
  for (const stream of [false, true]) {
    await step(`loop, stream=${stream}`, async () => {
      const runner = client.chat.completions.runTools({ model, messages: task, tools, max_tokens: 200, stream });
      ended(`a tool runner, stream=${stream}`, await runner.finalContent());
    });
  }
  await step("responses loop", async () => {
    const items = [...task];
    const flat = tools.map((t) => ({ type: "function", name: t.function.name, parameters, strict: true }));
    let response;
    for (let turn = 0; turn < 5; turn += 1) {
      const run = client.responses.stream({ model, input: items, tools: flat, store: false, max_output_tokens: 200 });
      response = await run.finalResponse();
      const calls = response.output.filter((item) => item.type === "function_call");
      if (!calls.length) break;
      items.push(...response.output);
      for (const call of calls) {
        const { function: run } = tools.find((t) => t.function.name === call.name).function;
        items.push({ type: "function_call_output", call_id: call.call_id, output: run(JSON.parse(call.arguments)) });
      }
    }
    ended("a loop of responses", response.output_text);
  });
  console.log(`== openai-node: ${passed} passed, ${failed.length} failed`);
  process.exit(failed.length ? 1 : 0);
};

main();
