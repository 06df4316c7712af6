// Sphinx shows an index entry with the title of its page; here, with that of its section.
var Scorer = {
  score: (result) => {
    const [name, title, anchor, , score, , kind] = result;
    if (kind === "index" && anchor) {
      const index = Search._index, file = index.docnames.indexOf(name);
      for (const [section, places] of Object.entries(index.alltitles))
        if (places.some(([f, id]) => f === file && "#" + id === anchor) && section !== title)
          result[1] = `${title} > ${section}`;
    }
    return score;
  },
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};

// A summary shows words: neither tables nor code, and no titles between its sentences.
const textOf = Search.htmlToText;
Search.htmlToText = (html, anchor) => {
  const page = new DOMParser().parseFromString(html, "text/html");
  const others = "table, pre, .provenance, h1, h2, h3, h4, h5, dt";
  page.querySelectorAll(others).forEach((element) => element.remove());
  return textOf(page.documentElement.outerHTML, anchor).replace(/\s+/g, " ").trim();
};

// Nor does it begin or end within a word.
const summaryOf = Search.makeSearchSummary;
Search.makeSearchSummary = (...args) => {
  const summary = summaryOf(...args);
  if (!summary) return summary;
  const text = summary.textContent.replace(/^\.\.\.(?=[A-Z])/, "").replace(/^\.\.\.\S*\s/, "... ");
  summary.textContent = text.length < 200 ? text : text.replace(/\s\S*$/, " ...");
  return summary;
};
