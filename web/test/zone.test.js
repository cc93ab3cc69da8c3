/** Times in Airflow's zone. */

import assert from "node:assert/strict";
import { test } from "node:test";
import { clock } from "../src/format.js";
import { inZone, toField, toUtc } from "../src/zone.js";

test("a time is shown in the zone, with its name", () => {
  assert.equal(inZone("2026-07-01T22:30:05Z", "Europe/Berlin"), "2026-07-02 00:30:05");
  assert.equal(clock("2026-01-01T00:00:00Z", "Asia/Kolkata"), "2026-01-01 05:30:00 GMT+5:30");
  assert.equal(clock("2026-01-01T00:00:00Z", "UTC"), "2026-01-01 00:00:00 UTC");
});

test("a local time becomes the same moment, beside a change of the clocks too", () => {
  assert.equal(toUtc("2026-03-29T03:30", "Europe/Berlin"), "2026-03-29T01:30:00.000Z");
  assert.equal(toUtc("2026-10-25T12:00", "Europe/Berlin"), "2026-10-25T11:00:00.000Z");
  for (const zone of ["UTC", "America/Los_Angeles", "Asia/Kolkata"]) {
    assert.equal(toField(toUtc("2026-11-22T23:45", zone), zone), "2026-11-22T23:45");
  }
});

test("what is no time becomes none", () => {
  assert.equal(toUtc("", "UTC"), "");
  assert.equal(toUtc("tomorrow", "UTC"), "");
});
