/** The filter of dead letters: as the address has it, as the monitor takes it, and in words. */

/** Field names, and what people call them. */
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

/** What letters can be grouped by, in the order in which it is offered. */
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

/** What each reason means, in a few words. */
export const REASONS = {
  max_deliveries: "used up its deliveries",
  terminated: "given up by a worker",
  deadline: "ran past its deadline",
  expired: "was over before it was done",
  orphan: "dead without a word; found by counting",
  undeliverable: "no consumer takes it",
};

/** @returns {URLSearchParams} a selection as query parameters */
export function asQuery(select) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(select)) {
    for (const each of Array.isArray(value) ? value : [value]) query.append(name, String(each));
  }
  return query;
}

/** @returns {object} the selection among query parameters, as JSON takes it */
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

/** @returns {string} a selection in words */
export function inWords(select) {
  const named = Object.entries(select)
    .filter(([name]) => name !== "parked")
    .map(([name, value]) => {
      if (name === "sequences") return value.length === 1 ? `letter ${value[0]}` : `${value.length} letters`;
      return `${FIELDS[name] ?? name} ${[value].flat().join(" or ")}`;
    });
  const kind = select.parked ? "parked letters" : "dead letters";
  return named.length ? `${kind}: ${named.join(", ")}` : `all ${kind}`;
}
