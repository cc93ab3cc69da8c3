/** Gaps in charts. */

import assert from "node:assert/strict";
import { test } from "node:test";
import { deathsOf, seriesOf } from "../src/chart_data.js";

const at = (second, pending) => ({ at: new Date(second * 1000).toISOString(), pending });

test("a time that nobody sampled is no line", () => {
  const [times, pending] = seriesOf([at(0, 1), at(20, 2), at(40, 3), at(2000, 4), at(2020, 5)], ["pending"]);
  assert.deepEqual(times, [0, 20, 40, 60, 2000, 2020]);
  assert.deepEqual(pending, [1, 2, 3, null, 4, 5]);
});

test("a point without numbers begins a gap", () => {
  const [times, pending] = seriesOf([at(0, 1), at(20, null), at(40, 3)], ["pending"]);
  assert.deepEqual(times, [0, 20, 40]);
  assert.deepEqual(pending, [1, null, 3]);
});

test("one point, or none, needs no distances", () => {
  assert.deepEqual(seriesOf([], ["pending"]), [[], []]);
  assert.deepEqual(seriesOf([at(5, 7)], ["pending"]), [[5], [7]]);
});

test("deaths that follow each other are steps, and between others there are none", () => {
  const deaths = [at(0, 0), at(60, 0), at(600, 0)].map((point, index) => ({ at: point.at, seconds: 60, count: index + 1 }));
  assert.deepEqual(deathsOf(deaths), [[0, 60, 120, 600, 660], [1, 2, 0, 3, 0]]);
  assert.deepEqual(deathsOf(deaths.slice(2), [0, 3600]), [[0, 600, 660, 3600], [0, 3, 0, 0]]);
  // The last step isn't over.
  assert.deepEqual(deathsOf(deaths.slice(2), [0, 640]), [[0, 600, 640], [0, 3, 3]]);
});
