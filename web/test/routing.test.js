/** Addresses. */

import assert from "node:assert/strict";
import { test } from "node:test";
import { letterAddress, lettersAddress, parse, queuesAddress, withChanges } from "../src/routing.js";
import { asQuery, asSelect, describe } from "../src/selection.js";
import { sortOf } from "../src/views/queues.js";

test("an address names its view", () => {
  const hash = letterAddress("nats", "a/b c", 7, { page: "3", sort: "-died_at" });
  const route = parse(hash);
  assert.deepEqual([route.view, route.connection, route.queue, route.sequence], ["letter", "nats", "a/b c", "7"]);
  assert.equal(route.query.get("page"), "3");
  assert.equal(parse("#/queues/n/q/jobs/4").view, "job");
  assert.equal(parse("#/queues/n/q/redrives/ab-1").id, "ab-1");
  assert.equal(parse("#/queues/%E0%A4%A").view, "queues");
  assert.equal(parse(queuesAddress()).view, "queues");
});

test("what isn't chosen isn't in the address", () => {
  const query = withChanges(new URLSearchParams("page=2&find=x"), { page: null, find: "", sort: "dead" });
  assert.equal(query.toString(), "sort=dead");
});

test("a selection survives its address", () => {
  const select = { reasons: ["deadline", "expired"], subject: "a.>", parked: true };
  const query = parse(lettersAddress("n", "q", asQuery(select))).query;
  assert.deepEqual(asSelect(query), select);
  assert.equal(describe({ sequences: [4] }), "dead letters: letter 4");
});

test("an order that doesn't exist is the usual one", () => {
  assert.deepEqual(sortOf("-pending"), { key: "pending", down: false });
  assert.deepEqual(sortOf("constructor"), { key: "state", down: true });
});
