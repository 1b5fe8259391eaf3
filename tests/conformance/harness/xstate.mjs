// Steps charts through stock XState. Reads one JSON request a line, `{chart, moves}`, where a
// move is `{now, event}`, `{now, timer}` or `{now, child, failed}`; answers each with one line,
// a list of what was seen after the start and after each move. argv[2]: the folder of xstate.
import { createRequire } from 'node:module';
import { createInterface } from 'node:readline';
import { join } from 'node:path';

const {
  createMachine, createActor, assign, raise, enqueueActions, fromPromise, and, or, not, stateIn,
} = createRequire(join(process.argv[2], 'package.json'))('xstate');

let log = [];
let now = 0;
const note = () => {};
const implementations = {
  actions: {
    log: enqueueActions(({ event }, params) => { log.push(`${params.name}@${event.type}`); }),
    raise: raise((_, params) => ({ type: params.event })),
    inc: assign(({ context }, params) => ({ [params.key]: context[params.key] + params.by })),
    inc_draft: assign(({ context }, params) => ({ [params.key]: context[params.key] + params.by })),
    set: assign((_, params) => ({ [params.key]: params.value })),
  },
  guards: {
    lt: ({ context }, params) => context[params.key] < params.value,
    odd: ({ context }, params) => context[params.key] % 2 === 1,
    x: ({ event }) => event.x === true,
  },
  delays: { slow: 40, by_n: ({ context }) => 5 * context.n },
  actors: Object.fromEntries(['good', 'bad', 'slow'].map((name) =>
    [name, fromPromise(() => new Promise(note))])),
};

function guard(raw) {
  if (typeof raw === 'string') return raw;
  if (raw.type === 'not') return not(guard(raw.guard));
  if (raw.type === 'and') return and(raw.guards.map(guard));
  if (raw.type === 'or') return or(raw.guards.map(guard));
  return raw.type === 'stateIn' ? stateIn(raw.state) : raw;
}

function config(value) {
  if (Array.isArray(value)) return value.map(config);
  if (value === null || typeof value !== 'object') return value;
  return Object.fromEntries(Object.entries(value).map(([key, each]) =>
    [key, key === 'guard' ? guard(each) : config(each)]));
}

function run({ chart, moves }) {
  const { maxMicrosteps, strict, ...rest } = chart;
  const machine = createMachine({ ...config(rest), options: { maxIterations: maxMicrosteps + 1 } },
    implementations);
  // What `initialTransition` and `transition` do, with one scope for all steps: theirs runs the
  // initial actions anew at each call.
  const self = createActor(machine);
  let actions = [];
  const scope = {
    self, id: '', sessionId: '', system: self.system, logger: note, defer: note, stopChild: note,
    emit: note, actionExecutor: (action) => { actions.push(action); },
  };
  let timers = {};
  const seen = [];
  const keep = (snapshot) => {
    if (snapshot.error instanceof Error) throw snapshot.error;
    for (const { type, params } of actions) {
      if (type === 'xstate.raise' && typeof params.delay === 'number') {
        timers[params.id.slice('xstate.after.'.length)] = now + params.delay;
      } else if (type === 'xstate.cancel') {
        delete timers[params.sendId.slice('xstate.after.'.length)];
      }
    }
    if (snapshot.status !== 'active') timers = {};
    seen.push({
      value: snapshot.value, context: snapshot.context, status: snapshot.status, log, timers: { ...timers },
      children: snapshot.status === 'active' ? Object.keys(snapshot.children).sort() : [],
      output: chart.output === undefined ? null : snapshot.output ?? null,
    });
    return true;
  };
  let snapshot;
  const step = (fn) => {
    log = [];
    actions = [];
    try {
      snapshot = fn();
      return keep(snapshot);
    } catch (error) {
      if (!/Infinite loop/.test(error.message)) throw error;
      return false;
    }
  };
  now = 0;
  if (!step(() => machine.getInitialSnapshot(scope))) return [...seen, 'endless'];
  for (const move of moves) {
    now = move.now;
    let event = move.event;
    if (move.timer !== undefined) {
      if (!(move.timer in timers)) return [...seen, 'no such timer'];
      delete timers[move.timer];
      event = { type: `xstate.after.${move.timer}` };
    } else if (move.child !== undefined) {
      if (!(move.child in snapshot.children)) return [...seen, 'no such child'];
      event = { type: `xstate.${move.failed ? 'error' : 'done'}.actor.${move.child}` };
    }
    if (!step(() => machine.transition(snapshot, event, scope))) return [...seen, 'endless'];
  }
  return seen;
}

for await (const line of createInterface({ input: process.stdin })) {
  let answer;
  try {
    answer = run(JSON.parse(line));
  } catch (error) {
    answer = [`refused: ${error.message}`];
  }
  console.log(JSON.stringify(answer));
}
