/** What a run has done: never more than the record says. */

import assert from "node:assert/strict";
import { test } from "node:test";
import { outcomeOf, outcomeOfResult, sentence, toneOf } from "../src/runs.js";
import { lettersOf, wavesOf } from "../src/confirmation.js";

test("a run that redrove nothing isn't green", () => {
  const outcome = outcomeOfResult({ redriven: 0, parked: 0, failed: 0, gone: 87 });
  assert.equal(toneOf(outcome), "info");
  assert.equal(sentence(outcome, "orders", "redrive"), "0 letters of orders redriven");
});

test("only jobs that completed since are good", () => {
  const redrive = { redriven: 5, parked: 0, failed: 0, outcomes: { completed: 3, died_again: 0, still_running: 2, unknown: 0 }, id: "r" };
  const since = (completed, diedAgain) => ({ ...redrive, outcomes: { completed, died_again: diedAgain, still_running: 0, unknown: 0 } });
  assert.equal(toneOf(outcomeOf(/** @type {any} */ (redrive))), "info");
  assert.equal(toneOf(outcomeOf(/** @type {any} */ (since(5, 0)))), "good");
  const died = outcomeOf(/** @type {any} */ (since(2, 3)));
  assert.equal(toneOf(died), "bad");
  assert.equal(sentence(died, "orders", "redrive"), "5 letters of orders redriven, 2 completed since, 3 died again");
});

test("the numbers of a run that parks are the parked ones", () => {
  assert.equal(sentence(outcomeOfResult({ parked: 1 }), "orders", "park"), "1 letter of orders parked");
});

test("a discard and its undo say how many letters are gone or back", () => {
  assert.equal(sentence(outcomeOfResult({ discarded: 2 }), "orders", "discard"), "2 letters of orders discarded");
  assert.equal(sentence(outcomeOfResult({ parked: 2 }), "orders", "undo"), "2 letters of orders brought back");
  const counts = /** @type {any} */ ({ redriven: 1, parked: 2, discarded: 4 });
  assert.deepEqual(["redrive", "park", "discard", "undo"].map((action) => lettersOf(counts, action)), [3, 2, 4, 2]);
});

test("sizes of waves", () => {
  assert.deepEqual(wavesOf("10, 100,rest", "5"), { waves: [10, 100, "rest"], stop_when: 0.05 });
  assert.deepEqual(wavesOf(" ", "5"), {});
});
