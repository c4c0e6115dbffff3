// Vercel's AI SDK over an API like OpenAI's: text, stream, objects.

import assert from "node:assert";

import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, Output, streamText } from "ai";
import { z } from "zod";

import { run } from "./run.mjs";

const provider = createOpenAICompatible({ name: "moe", baseURL: process.env.BASE_URL + "/v1", supportsStructuredOutputs: true });
const model = provider("demo"), prompt = "def read(";

await run("ai", {
  async text() {
    assert((await generateText({ model, prompt, maxOutputTokens: 8 })).text);
  },
  async stream() {
    let text = "";
    for await (const part of streamText({ model, prompt, maxOutputTokens: 8 }).textStream) text += part;
    assert(text);
  },
  async object() {
    const output = Output.object({ schema: z.object({ x: z.number().int().min(0).max(9) }) });
    const answer = await generateText({ model, prompt, output, maxOutputTokens: 60 });
    assert(answer.output.x >= 0);
  },
});
