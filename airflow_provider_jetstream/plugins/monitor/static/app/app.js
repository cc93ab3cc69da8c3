/** The frame around the views: breadcrumb, live button, started DAG runs. */

import { getMe } from "./api.js";
import { Confirmation } from "./confirmation.js";
import { Component, html, useEffect, useRef } from "./html.js";
import { Failure, Loading, Notice } from "./components.js";
import { setLive, useLive, usePoll } from "./polling.js";
import { queueAddress, groupsAddress, jobsAddress, lettersAddress, queuesAddress, useRoute } from "./routing.js";
import { Runs } from "./runs.js";
import { selectionOf } from "./selection.js";
import { Session } from "./session.js";
import { CardView } from "./views/card.js";
import { GroupsView } from "./views/groups.js";
import { JobsView } from "./views/jobs.js";
import { LetterView } from "./views/letter.js";
import { LettersView } from "./views/letters.js";
import { QueueView } from "./views/queue.js";
import { QueuesView } from "./views/queues.js";

const VIEWS = {
  card: CardView,
  queues: QueuesView,
  queue: QueueView,
  dead: GroupsView,
  letters: LettersView,
  letter: LetterView,
  jobs: JobsView,
};
const ME_SECONDS = 60;

/** The whole page. */
export function App() {
  const route = useRoute();
  const me = usePoll(getMe, ME_SECONDS, "me");
  const main = useRef(null);
  const firstRender = useRef(true);
  const address = JSON.stringify([route.view, route.connection, route.queue, route.sequence]);
  useEffect(() => {
    document.title = titleOf(route);
    // Screen readers and keyboards start at the new content.
    if (!firstRender.current) {
      main.current.focus({ preventScroll: true });
      window.scrollTo(0, 0);
    }
    firstRender.current = false;
  }, [address]);
  const View = VIEWS[route.view];
  const card = route.view === "card";
  return html`
    ${
      !card &&
      html`<header class="top">
        <${Breadcrumb} route=${route} />
        <${Live} />
      </header>`
    }
    <main ref=${main} tabindex="-1" class=${card ? "card" : ""}>
      <${ErrorBoundary} key=${address}>
        ${!me.data && me.error && html`<${Failure} error=${me.error} reload=${me.reload} />`}
        ${!me.data && !me.error && html`<${Loading} what="the page" rows=${6} />`}
        ${
          me.data &&
          html`<${Session.Provider} value=${me.data}>
            ${me.error?.status === 401 && html`<${Failure} error=${me.error} />`}
            ${!card && html`<${Runs} />`}
            <${View} ...${route} />
            <${Confirmation} />
          <//>`
        }
      <//>
    </main>
  `;
}

const titleOf = ({ view, queue, sequence }) =>
  [view === "letter" && `seq ${sequence}`, view === "dead" && "Dead letters", queue, "JetStream"].filter(Boolean).join(" · ");

/** The path to the current view, with links. */
function Breadcrumb({ route }) {
  const { view, connection, queue, sequence, query } = route;
  const steps = [["JetStream", queuesAddress()]];
  if (view === "jobs") steps.push(["Jobs", jobsAddress(query)]);
  if (queue) steps.push([queue, queueAddress(connection, queue)]);
  const parked = query.get("parked") === "true" ? { parked: "true" } : {};
  if (view === "dead" || view === "letters" || view === "letter") {
    steps.push([parked.parked ? "Parked" : "Dead letters", groupsAddress(connection, queue, parked)]);
  }
  if (view === "letters" || view === "letter") {
    steps.push(["Letters", lettersAddress(connection, queue, selectionOf(query))]);
  }
  if (view === "letter") steps.push([`seq ${sequence}`, window.location.hash]);
  return html`
    <nav class="trail" aria-label="Breadcrumb">
      <ol>
        ${steps.map(
          ([name, to], index) => html`<li key=${to}>
            ${
              index === steps.length - 1
                ? html`<span aria-current="page">${name}</span>`
                : html`<a href=${to}>${name}</a>`
            }
          </li>`,
        )}
      </ol>
    </nav>
  `;
}

function Live() {
  const live = useLive();
  return html`
    <button type="button" class="live" aria-pressed=${live} onClick=${() => setLive(!live)}
      title=${live ? "Numbers refresh automatically. Press to pause." : "Press to resume refreshing."}>
      <span class="dot ${live ? "on" : ""}" aria-hidden="true"></span>${live ? "Live" : "Paused"}
    </button>
  `;
}

/** Shows an error in place of a view that fails. */
class ErrorBoundary extends Component {
  state = { error: null };

  componentDidCatch(error) {
    console.error(error);
    this.setState({ error });
  }

  render({ children }, { error }) {
    if (!error) return children;
    return html`<${Notice} tone="bad" title="This view failed">
      ${error.message}. Go back to <a href=${queuesAddress()}>the queues</a>, or reload the page.
    <//>`;
  }
}
