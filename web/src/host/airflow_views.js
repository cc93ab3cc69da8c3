/**
 * The page's views as React apps of Airflow: the card on the dashboard, and the tabs on a DAG, a run and a task.
 *
 * Airflow imports this file and takes the function of each app's name. A tab is drawn by the page's own script in a
 * shadow root: Airflow's components change between releases, React's `createElement` doesn't.
 */

const page = new URL("../", import.meta.url);

/** @typedef {{dagId?: string, runId?: string, taskId?: string, mapIndex?: string}} Where what Airflow says of its page */

/** @param {Where} where */
function addressOf({ dagId, runId, taskId, mapIndex }) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries({ dag_id: dagId, run_id: runId, task_id: taskId, map_index: mapIndex })) {
    if (value != null && value !== "" && value !== "-1") query.set(name, value);
  }
  return `#/${runId ? "jobs" : "dag"}?${query}`;
}

/** @param {Where} where */
function JobsTab(where) {
  const { createElement, useEffect, useRef } = globalThis.React;
  const element = useRef(null);
  const address = addressOf(where);
  useEffect(() => {
    let ended = false;
    let unmount = () => {};
    import(new URL(`static/${SCRIPT_NAME}`, page).href).then((script) => {
      if (!ended) unmount = script.mount(element.current, address);
    });
    return () => {
      ended = true;
      unmount();
    };
  }, [address]);
  return createElement("div", { ref: element, style: { flex: 1, minHeight: 0, overflow: "auto" } });
}

function Card() {
  return globalThis.React.createElement("iframe", {
    src: new URL("#/card", page).href,
    title: "JetStream",
    // After Airflow's own first numbers. The page inside the frame sets the height.
    style: { order: 3, flex: "none", width: "100%", height: "124px", border: 0 },
  });
}

globalThis["JetStream card"] = Card;
globalThis["JetStream jobs"] = JobsTab;
globalThis["JetStream letters"] = JobsTab;
