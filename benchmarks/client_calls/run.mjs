// Calls each function, and prints what failed as JSON: run.py for Node.

import { readFileSync } from "node:fs";

export async function run(name, calls) {
  const found = {};
  for (const [call, make] of Object.entries(calls)) {
    try {
      await make();
      found[call] = null;
    } catch (error) {
      found[call] = `${error.name}: ${String(error.message).split("\n")[0].slice(0, 160)}`;
    }
  }
  const { version } = JSON.parse(readFileSync(new URL(`node_modules/${name}/package.json`, import.meta.url)));
  console.log(JSON.stringify({ version, calls: found }));
}
