/** The console's parts that need no page. CONSOLE_FILES is a directory that holds them, as modules. */

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";
import { pathToFileURL } from "node:url";

const CONSOLE = pathToFileURL(`${process.env.CONSOLE_FILES}/`);
const format = await import(new URL("format.js", CONSOLE));
const { EventParser } = await import(new URL("sse.js", CONSOLE));
const { doing, toneOf } = await import(new URL("replica.js", CONSOLE));
const { standing } = await import(new URL("turn.js", CONSOLE));
const { wordsFor } = await import(new URL("messages.js", CONSOLE));

const TEXT =
  'data: {"a":"Grüße, 世界 🐋"}\n\n: a comment\r\n\r\nevent: x\rdata:one\rdata: two\r\r\ndata: [DONE]\n\n';
const EVENTS = ['{"a":"Grüße, 世界 🐋"}', "one\ntwo", "[DONE]"];

test("events come out the same wherever the bytes are cut", () => {
  const bytes = new TextEncoder().encode(TEXT);
  for (let cut = 0; cut <= bytes.length; cut += 1) {
    const parser = new EventParser();
    const found = [...parser.push(bytes.subarray(0, cut)), ...parser.push(bytes.subarray(cut))];
    assert.deepEqual(found, EVENTS, `cut at ${cut}`);
  }
  const parser = new EventParser();
  assert.deepEqual(
    [...bytes].flatMap((_, index) => parser.push(bytes.subarray(index, index + 1))),
    EVENTS,
  );
});

test("what is unfinished is no event", () => {
  const parser = new EventParser();
  assert.deepEqual(parser.push(new TextEncoder().encode("data: a\n\ndata: b\n")), ["a"]);
});

test("names are quoted where a shell needs it", () => {
  const cases = [
    ["smollm2-135m.q4_1", "smollm2-135m.q4_1"],
    ["a model", "'a model'"],
    ["it's; $HOME", `'it'"'"'s; $HOME'`],
    ["", "''"],
  ];
  for (const [name, pasted] of cases) assert.equal(format.pasteable(name), pasted);
});

test("sizes are decimal, as the command line has them", () => {
  const cases = [
    [0, "0 B"],
    [999, "999 B"],
    [1000, "1 kB"],
    [98_362_432, "98.4 MB"],
    [2 ** 53, "9,007.2 TB"],
  ];
  for (const [value, text] of cases) assert.equal(format.bytes(value), text);
});

test("spans", () => {
  const exact = [
    [0, "0 s"],
    [-3, "0 s"],
    [89, "89 s"],
    [90, "1 min 30 s"],
    [130, "2 min 10 s"],
    [3600, "60 min"],
    [7500, "2 h 5 min"],
    [200_000, "2 d 7 h"],
  ];
  for (const [seconds, text] of exact) assert.equal(format.duration(seconds), text);
  const atRest = [
    [59.4, "59 s"],
    [60, "1 min"],
    [3599, "59 min"],
    [3600, "1 h"],
    [200_000, "2 d"],
  ];
  for (const [seconds, text] of atRest) assert.equal(format.age(seconds), text);
  for (const [seconds, text] of [
    [30, "30 s"],
    [119.7, "2 min"],
    [599.2, "10 min"],
  ])
    assert.equal(format.limit(seconds), text);
});

test("counts and shares", () => {
  assert.deepEqual(
    [0, 1, 2, 1234].map((value) => format.count(value, "request")),
    ["0 requests", "1 request", "2 requests", "1,234 requests"],
  );
  assert.deepEqual(
    [format.percent(999_999, 1_000_000), format.percent(0, 0), format.percent(1, 2)],
    [99, 100, 50],
  );
  assert.deepEqual([format.cores(1000), format.cores(1500)], ["1 core", "1.5 cores"]);
});

test("what a replica is doing", () => {
  const since = Date.parse("2026-01-01T12:00:00Z");
  const replica = (state, more = {}) => ({
    state,
    since_at: "2026-01-01T12:00:00Z",
    deadline_at: null,
    outcome: null,
    released: false,
    ...more,
  });
  const cases = [
    [replica("queued"), 3, "Queued for 3 s", "busy"],
    [
      replica("starting", { deadline_at: "2026-01-01T12:09:59.4Z" }),
      12,
      "Starting for 12 s (limit 10 min)",
      "busy",
    ],
    [
      replica("starting", { deadline_at: "2026-01-01T12:10:00Z" }),
      130,
      "Starting for 2 min 10 s (limit 10 min)",
      "busy",
    ],
    [replica("ready"), 200, "Ready for 3 min", "good"],
    [replica("ready"), -2, "Ready for 0 s", "good"], // clocks differ
    [replica("finished", { outcome: "failed", released: true }), 61, "Failed 1 min ago", "bad"],
    [
      replica("finished", { outcome: "cancelled" }),
      5,
      "Stopped 5 s ago; its reservation is still held",
      "quiet",
    ],
  ];
  for (const [record, seconds, text, tone] of cases) {
    assert.equal(doing(record, since + seconds * 1000), text);
    assert.equal(toneOf(record), tone);
  }
});

test("how an answer stands", () => {
  const turn = (state, more = {}) => ({
    state,
    tokens: 0,
    askedAt: 1000,
    firstAt: null,
    lastAt: null,
    finish: null,
    error: null,
    ...more,
  });
  const some = { tokens: 91, firstAt: 2200, lastAt: 8200 };
  const cases = [
    [turn("waiting"), "Waiting for the first token … 3 s"],
    [turn("answering", { tokens: 1, firstAt: 1400, lastAt: 1400 }), "1 token · first token 0.4 s"],
    [turn("stopping", some), "Stopping …"],
    [turn("stopped", some), "Stopped by you · 91 tokens · 15 tok/s · first token 1.2 s"],
    [turn("stopped"), "Stopped by you · 0 tokens"],
    [
      turn("incomplete", { ...some, error: { code: "peer_lost" } }),
      "incomplete: peer_lost · 91 tokens · 15 tok/s · first token 1.2 s",
    ],
    [
      turn("done", { ...some, finish: "length" }),
      "91 tokens · 15 tok/s · first token 1.2 s · cut off at the length limit",
    ],
    [
      turn("done", { tokens: 3, firstAt: 1400, lastAt: 2400, finish: "stop" }),
      "3 tokens · 2 tok/s · first token 0.4 s",
    ],
  ];
  for (const [record, text] of cases) assert.equal(standing(record, 4000), text);
});

test("a code that nobody knows has words too", () => {
  assert.ok(wordsFor("something_new").what);
  assert.ok(wordsFor("constructor").what);
});

test("texts have the contrast that WCAG 2.2 asks for at level AA, in both colour schemes", () => {
  const css = readFileSync(new URL("style.css", CONSOLE), "utf8");
  const [light, dark] = [...css.matchAll(/:root \{([^}]*)\}/g)].map((block) =>
    Object.fromEntries(
      [...block[1].matchAll(/--([\w-]+): (#[0-9a-f]{6});/g)].map(([, name, value]) => [name, value]),
    ),
  );
  const texts = ["ink", "quiet", "good", "busy", "warn", "bad", "accent"];
  const pairs = [
    ...["page", "card", "sunken"].flatMap((ground) => texts.map((text) => [text, ground])),
    ["on-accent", "accent"],
    ["on-accent", "accent-strong"],
    ["card", "bad"],
    ["ink", "question"],
    ["ink", "bad-soft"],
    ["bad", "bad-soft"],
    ["quiet", "bad-soft"],
    ["ink", "warn-soft"],
  ];
  for (const [name, scheme] of [
    ["light", light],
    ["dark", { ...light, ...dark }],
  ]) {
    for (const [text, ground] of pairs) {
      const ratio = contrast(scheme[text], scheme[ground]);
      assert.ok(ratio >= 4.5, `${name}: ${text} on ${ground} has ${ratio.toFixed(2)}`);
    }
    assert.ok(contrast(scheme.edge, scheme.card) >= 3, `${name}: edges of controls`);
  }
});

function contrast(one, other) {
  const [high, low] = [luminance(one), luminance(other)].sort((a, b) => b - a);
  return (high + 0.05) / (low + 0.05);
}

function luminance(colour) {
  const [red, green, blue] = [1, 3, 5].map((at) => {
    const value = parseInt(colour.slice(at, at + 2), 16) / 255;
    return value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
}
