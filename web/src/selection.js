/** The selection of dead letters: as query parameters, as JSON, and as text. */

/** Field names and their labels. */
export const FIELDS = {
  reasons: "reason",
  error_class: "error class",
  fingerprint: "fingerprint",
  traceback_digest: "traceback digest",
  consumer: "consumer",
  subject: "subject",
  dag_id: "DAG",
  run_id: "run",
  task_id: "task",
};

/** The fields to group letters by, in display order. */
export const GROUPINGS = {
  reason: "Reason",
  error_class: "Error class",
  fingerprint: "Fingerprint",
  subject: "Subject",
  traceback_digest: "Traceback digest",
  error_place: "Error place",
  consumer: "Consumer",
  dag_id: "DAG",
  task_id: "Task",
};

/** The meaning of each reason. */
export const REASONS = {
  max_deliveries: "used up its deliveries",
  terminated: "terminated by a worker",
  deadline: "exceeded its deadline",
  expired: "expired before it was completed",
  orphan: "dead without an advisory; found by counting",
  undeliverable: "matches no consumer's filter",
};

/** @returns {URLSearchParams} a selection as query parameters */
export function asQuery(select) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(select)) {
    for (const item of Array.isArray(value) ? value : [value]) query.append(name, String(item));
  }
  return query;
}

/** @returns {object} the selection among query parameters, as JSON */
export function asSelect(query) {
  const select = {};
  for (const name of Object.keys(FIELDS)) {
    const values = query.getAll(name);
    if (values.length) select[name] = name === "reasons" ? values : values[0];
  }
  if (query.get("parked") === "true") select.parked = true;
  return select;
}

/** @returns {URLSearchParams} only the selection among query parameters */
export const selectionOf = (query) => asQuery(asSelect(query));

/** @returns {string} a selection as text for people */
export function describe(select) {
  const named = Object.entries(select)
    .filter(([name]) => name !== "parked")
    .map(([name, value]) => {
      if (name === "sequences") return value.length === 1 ? `letter ${value[0]}` : `${value.length} letters`;
      return `${FIELDS[name] ?? name} ${[value].flat().join(" or ")}`;
    });
  const kind = select.parked ? "parked letters" : "dead letters";
  return named.length ? `${kind}: ${named.join(", ")}` : `all ${kind}`;
}
