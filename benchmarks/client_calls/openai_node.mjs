// openai-node: chats, completions, responses, embeddings; streams, tools, structured output.

import assert from "node:assert";

import OpenAI from "openai";

import { run } from "./run.mjs";

const client = new OpenAI({ baseURL: process.env.BASE_URL + "/v1", timeout: 60_000 });
const model = "demo", messages = [{ role: "user", content: "def read(" }];
const schema = { type: "object", properties: { city: { enum: ["Rome", "Oslo"] } }, required: ["city"], additionalProperties: false };
const weather = { type: "function", function: { name: "weather", parameters: schema } };

await run("openai", {
  async models() {
    assert.equal((await client.models.list()).data[0].id, model);
  },
  async chat() {
    const answer = await client.chat.completions.create({ model, messages, max_tokens: 8, logprobs: true, n: 2 });
    assert.equal(answer.choices.length, 2);
    assert(answer.choices[0].message.content && answer.choices[0].logprobs.content.length);
  },
  async chat_stream() {
    const parts = [];
    for await (const part of await client.chat.completions.create({ model, messages, max_tokens: 8, stream: true, stream_options: { include_usage: true } })) parts.push(part);
    assert.equal(parts.at(-1).usage.completion_tokens, 8);
  },
  async stream_helper() {
    const stream = client.chat.completions.stream({ model, messages, max_tokens: 8 });
    assert(await stream.finalContent());
  },
  async completions() {
    assert.equal((await client.completions.create({ model, prompt: ["a", "b"], max_tokens: 4 })).choices.length, 2);
  },
  async tools() {
    const answer = await client.chat.completions.create({ model, messages, tools: [weather], tool_choice: "required", max_tokens: 60 });
    assert(["Rome", "Oslo"].includes(JSON.parse(answer.choices[0].message.tool_calls[0].function.arguments).city));
  },
  async custom_tool() {
    const format = { type: "grammar", grammar: { syntax: "regex", definition: "[ab]{3}" } };
    const tools = [{ type: "custom", custom: { name: "letters", format } }], tool_choice = { type: "custom", custom: { name: "letters" } };
    const answer = await client.chat.completions.create({ model, messages, tools, tool_choice, max_tokens: 20 });
    assert.match(answer.choices[0].message.tool_calls[0].custom.input, /^[ab]{3}$/);
  },
  async json_schema() {
    const response_format = { type: "json_schema", json_schema: { name: "place", strict: true, schema } };
    const answer = await client.chat.completions.parse({ model, messages, response_format, max_tokens: 60 });
    assert(["Rome", "Oslo"].includes(answer.choices[0].message.parsed.city));
  },
  async responses() {
    assert((await client.responses.create({ model, input: "def read(", max_output_tokens: 16 })).output_text);
  },
  async responses_stream() {
    const response = await client.responses.stream({ model, input: "def read(", max_output_tokens: 16 }).finalResponse();
    assert(response.output_text);
  },
  async embeddings() {
    assert((await client.embeddings.create({ model, input: ["a", "b"] })).data[1].embedding.length > 0);
  },
});
