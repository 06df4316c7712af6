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
