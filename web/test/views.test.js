/** What views make of data. */

import assert from "node:assert/strict";
import { test } from "node:test";
import { ago, bytes, count, duration, percent, rate } from "../src/format.js";
import { patchProblem } from "../src/edit_many.js";
import { asInForm, asStored, kindOf, notEditable } from "../src/views/edit.js";
import { sortOf } from "../src/views/letters.js";
import { momentOf } from "../src/zone.js";
import { waveSentence } from "../src/runs.js";
import { jobName } from "../src/views/origin.js";
import { outcomeTone } from "../src/views/redrives.js";
import { withLine } from "../src/views/search.js";
import { sumOf } from "../src/figure.js";
import { attention } from "../src/queue_state.js";

test("a sum is as old and as uncertain as the worst of its parts", () => {
  /** @type {import("../src/api_types").Figure} */
  const known = { value: 3, age: 1, certainty: "exact" };
  assert.deepEqual(sumOf([known, { ...known, age: 9, certainty: "old" }]), { value: 6, age: 9, certainty: "old" });
  // What isn't known is no 0.
  assert.deepEqual(sumOf([known, { value: null, age: null, certainty: "unknown" }]), { value: 3, age: 1, certainty: "at_least" });
  assert.equal(sumOf([{ value: null, age: null, certainty: "unknown" }]).value, null);
  assert.deepEqual(sumOf([]).value, 0);
});

test("numbers for people", () => {
  assert.deepEqual([count(99_999), count(1_000_000), count(null)], ["99,999", "1M", "–"]);
  assert.deepEqual([rate(0), rate(0.5), rate(12.34)], ["0/s", "30/min", "12.3/s"]);
  assert.deepEqual([bytes(1023), bytes(1536)], ["1,023 B", "1.5 KiB"]);
  assert.deepEqual([duration(59), duration(3700), duration(90_000)], ["59 s", "1 h 1 min", "1 d 1 h"]);
  assert.deepEqual([percent(0.001), percent(0.5), percent(0)], ["<1 %", "50 %", "0 %"]);
  assert.equal(ago("2026-01-01T00:00:00Z", Date.parse("2026-01-01T00:03:10Z")), "3 min ago");
});

test("a job is named as its author named it; without an id, by its subject and time", () => {
  const origin = { dag_id: "d", run_id: "r", task_id: "t", map_index: -1 };
  const job = { sequence: 14, subject: "sales.eu", died_at: "2026-11-22T02:56:13Z" };
  assert.equal(jobName({ ...job, job_id: "d/r/t/-1/order-7", origin }), "order-7");
  assert.equal(jobName({ ...job, job_id: "d/r/t/-1/#3", origin }), "t job 3");
  assert.equal(jobName({ ...job, job_id: "5f0f1f6e-9a9d-4e5c-8a8b-1f0c8e0f7a11", origin: null }), "5f0f1f6e-9a9d-4e5c-8a8b-1f0c8e0f7a11");
  assert.match(jobName({ ...job, job_id: "14" }), /^sales\.eu, \d\d:56:13$/);
});

test("a canary says what became of it and asks for the rest", () => {
  /** @type {any} */
  const wave = { number: 1, state: "awaiting", redriven: 10, outcomes: outcomes(7, 0), reason: "" };
  const redrive = /** @type {any} */ ({ letters: 192, waves: [wave] });
  assert.equal(waveSentence(wave, redrive), "Wave 1: 7 of the first 10 letters ended, 7 of them completed");
  assert.equal(waveSentence({ ...wave, state: "passed", outcomes: outcomes(10, 0) }, redrive), "Wave 1: 10 of the first 10 letters completed");
  const stopped = waveSentence({ ...wave, state: "at_gate", outcomes: outcomes(0, 10), reason: "of 10 jobs, 10 died again" }, redrive);
  assert.match(stopped, /10 died again\. It has stopped here: .*\. Redrive the other 182\?$/);
});

test("lines of a difference", () => {
  assert.deepEqual(["--- a", "+++ b", "@@ -1 +1 @@", "-x", "+y", " z"].map(kindOf), ["place", "place", "place", "removed", "added", ""]);
});

test("a body that isn't whole can't be edited", () => {
  assert.match(String(notEditable(/** @type {any} */ ({ payload: { truncated: true } }))), /too large/);
  assert.match(String(notEditable(/** @type {any} */ ({ payload: null }))), /role/);
  assert.equal(notEditable(/** @type {any} */ ({ payload: { truncated: false } })), null);
});

const outcomes = (completed, diedAgain) => ({ completed, died_again: diedAgain, still_running: 0, unknown: 0 });

test("an edit keeps the ends of lines, or isn't offered", () => {
  const raw = '{\r\n"a": 1\r\n}';
  assert.equal(asStored(asInForm(raw).replace("1", "2"), raw), '{\r\n"a": 2\r\n}');
  assert.equal(asStored("a\nb", "x\ny"), "a\nb");
  for (const mixed of ["a\r\nb\nc", "a\rb", "a\r\nb\rc"]) {
    assert.match(String(notEditable(/** @type {any} */ ({ payload: { truncated: false, raw: mixed } }))), /several ways/);
  }
});

test("a patch is a JSON array", () => {
  assert.equal(patchProblem('[{"op": "remove", "path": "/a"}]'), null);
  assert.match(String(patchProblem("{}")), /array/);
  assert.match(String(patchProblem("[")), /no JSON/);
});

test("an address with nonsense is the usual view", () => {
  assert.equal(sortOf("-died_at"), "-died_at");
  assert.equal(sortOf("drop table"), "-died_at");
  assert.equal(momentOf("yesterday"), null);
  assert.equal(momentOf("2026-01-01T00:00:00Z"), "2026-01-01T00:00:00Z");
});

test("a redrive is good only where all of its jobs completed", () => {
  const redrive = /** @type {any} */ ({ state: "finished", redriven: 87, failed: 0, waves: [], outcomes: outcomes(0, 0) });
  assert.equal(outcomeTone(redrive), "plain");
  assert.equal(outcomeTone({ ...redrive, outcomes: outcomes(87, 0) }), "good");
  assert.equal(outcomeTone({ ...redrive, outcomes: outcomes(80, 7) }), "bad");
  assert.equal(outcomeTone({ ...redrive, state: "at_gate", outcomes: outcomes(87, 0) }), "warn");
  // Ten that died again came back once more.
  const again = { ...redrive, redriven: 97, waves: [{ brought_again: 0 }, { brought_again: 10 }] };
  assert.equal(outcomeTone({ ...again, outcomes: outcomes(87, 0) }), "good");
  assert.equal(outcomeTone({ ...again, outcomes: outcomes(86, 0) }), "plain");
  assert.equal(outcomeTone({ ...redrive, redriven: 0, outcomes: outcomes(0, 0) }), "plain");
});

test("a search's lines", () => {
  const empty = { found: [], progress: null, end: null };
  const found = withLine(empty, /** @type {any} */ ({ type: "found", letter: { sequence: 1 }, where: ["body"] }));
  assert.equal(found.found.length, 1);
  assert.deepEqual(withLine(found, { type: "progress", read: 5, of: 9 }).progress, { type: "progress", read: 5, of: 9 });
});

test("queues that nobody serves come first", () => {
  const none = { value: 0, age: 1, certainty: "exact" };
  const queue = /** @type {any} */ ({ state: "unserved", limits: [], dead: none, problem: null });
  assert.equal(attention(queue), 0);
  assert.equal(attention({ ...queue, state: "dying" }), 0.5);
  assert.equal(attention({ ...queue, state: "dead", dead: { ...none, value: 5 } }), 1);
  assert.ok(attention({ ...queue, state: "working" }) > 2);
});
