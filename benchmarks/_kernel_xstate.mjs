// The same as _kernel_worker.py for XState's live actor. argv[2]: the folder of xstate.
import { createRequire } from 'node:module';
import { createInterface } from 'node:readline';
import { join } from 'node:path';

const { createMachine, createActor, assign } =
  createRequire(join(process.argv[2], 'package.json'))('xstate');

const LIMIT = 1e9;
// A service that is done when it starts, so that no promise is waited for.
const job = {
  transition: (state) => state,
  getInitialSnapshot: () => ({ status: 'done', output: 1, error: undefined, input: undefined }),
  getPersistedSnapshot: (state) => state,
  restoreSnapshot: (state) => state,
};
const implementations = {
  actions: { inc: assign({ n: ({ context }) => context.n + 1 }) },
  guards: { low: ({ context }) => context.n < LIMIT },
  actors: { job },
};
const machines = new Map();
const actors = new Map();

const build = (chart) => createMachine(chart, implementations);
const started = (machine) => createActor(machine).start();

function seconds(fn) {
  globalThis.gc?.();
  const before = process.cpuUsage();
  fn();
  const { user, system } = process.cpuUsage(before);
  return (user + system) / 1e6;
}

function answer({ do: what, case: name, chart, events, count }) {
  if (what === 'build') {
    return seconds(() => { for (let i = 0; i < count; i += 1) build(chart); });
  }
  if (!machines.has(name)) machines.set(name, build(chart));
  const machine = machines.get(name);
  if (what === 'runner') {
    const made = events.map((type) => ({ type }));
    const fresh = !actors.has(name);
    if (fresh) actors.set(name, started(machine));
    const actor = actors.get(name);
    const drive = (times) => {
      for (let i = 0; i < times; i += 1) actor.send(made[i % made.length]);
    };
    if (fresh) drive(Math.ceil(20000 / made.length) * made.length);
    return seconds(() => drive(count));
  }
  if (what === 'restore') {
    const actor = started(machine);
    return seconds(() => {
      for (let i = 0; i < count; i += 1) {
        const text = JSON.stringify(actor.getPersistedSnapshot());
        createActor(machine, { snapshot: JSON.parse(text) });
      }
    });
  }
  if (what === 'memory') {
    globalThis.gc?.();
    const before = process.memoryUsage().heapUsed;
    const kept = Array.from({ length: count }, () => started(machine));
    globalThis.gc?.();
    return (process.memoryUsage().heapUsed - before) / kept.length;
  }
  return null;
}

for await (const line of createInterface({ input: process.stdin })) {
  console.log(JSON.stringify({ value: answer(JSON.parse(line)) }));
}
