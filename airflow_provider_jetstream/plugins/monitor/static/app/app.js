/** The page around the views: where one is, whether it is live, and what was started. */

import { getMe } from "./api.js";
import { Confirmation } from "./confirm.js";
import { Component, html, useEffect, useRef } from "./html.js";
import { Failure, Loading, Notice } from "./parts.js";
import { setLive, useLive, usePoll } from "./polling.js";
import { queueAddress, groupsAddress, jobsAddress, lettersAddress, queuesAddress, useRoute } from "./routing.js";
import { Runs } from "./runs.js";
import { selectionOf } from "./selection.js";
import { Session } from "./session.js";
import { CardView } from "./views/card.js";
import { DeadView } from "./views/dead.js";
import { JobsView } from "./views/jobs.js";
import { LetterView } from "./views/letter.js";
import { LettersView } from "./views/letters.js";
import { QueueView } from "./views/queue.js";
import { QueuesView } from "./views/queues.js";

const VIEWS = {
  card: CardView,
  queues: QueuesView,
  queue: QueueView,
  dead: DeadView,
  letters: LettersView,
  letter: LetterView,
  jobs: JobsView,
};
const ME_SECONDS = 60;

/** All there is. */
export function App() {
  const route = useRoute();
  const me = usePoll(getMe, ME_SECONDS, "me");
  const main = useRef(null);
  const began = useRef(true);
  const place = JSON.stringify([route.view, route.connection, route.queue, route.sequence]);
  useEffect(() => {
    document.title = titleOf(route);
    // Those who listen or use keys begin at what is new.
    if (!began.current) {
      main.current.focus({ preventScroll: true });
      window.scrollTo(0, 0);
    }
    began.current = false;
  }, [place]);
  const View = VIEWS[route.view];
  const card = route.view === "card";
  return html`
    ${
      !card &&
      html`<header class="top">
        <${Trail} route=${route} />
        <${Live} />
      </header>`
    }
    <main ref=${main} tabindex="-1" class=${card ? "card" : ""}>
      <${Guard} key=${place}>
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

/** Where one is, each part a way back. */
function Trail({ route }) {
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
    <nav class="trail" aria-label="Where you are">
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
      title=${live ? "Numbers refresh by themselves. Press to hold them still." : "Press to refresh again."}>
      <span class="dot ${live ? "on" : ""}" aria-hidden="true"></span>${live ? "Live" : "Paused"}
    </button>
  `;
}

/** Keeps the page there when a view breaks. */
class Guard extends Component {
  state = { error: null };

  componentDidCatch(error) {
    console.error(error);
    this.setState({ error });
  }

  render({ children }, { error }) {
    if (!error) return children;
    return html`<${Notice} tone="bad" title="This view broke">
      ${error.message}. Go back to <a href=${queuesAddress()}>the queues</a>, or reload the page.
    <//>`;
  }
}
