/* Search results of a page's text lead to the section that holds the words.
 *
 * Sphinx's index knows words by page, and titles by section. Sphinx fetches each page
 * that it found, to show some of its text: here the section is found in that page.
 */
"use strict";

const headingOf = (section) => {
  const heading = section.querySelector("h1, h2, h3, h4").cloneNode(true);
  heading.querySelectorAll("a.headerlink").forEach((mark) => mark.remove());
  return heading.textContent.trim();
};

/** A smallest section that holds all words, or else one; best with one in its heading. */
const findSection = (html, words) => {
  const page = new DOMParser().parseFromString(html, "text/html");
  const sections = [...page.querySelectorAll('[role="main"] section[id]')];
  const holding = (some) =>
    sections.filter((section) =>
      some.every((word) => section.textContent.toLowerCase().includes(word)),
    );
  const all = holding(words);
  const found = all.length ? all : words.flatMap((word) => holding([word]));
  const smallest = found.filter(
    (section) => !found.some((x) => x !== section && section.contains(x)),
  );
  const isNamed = (section) =>
    words.some((word) => headingOf(section).toLowerCase().includes(word));
  const best = smallest.find(isNamed) ?? smallest[0];
  return best?.parentElement.closest("section") ? best : null; // not the whole page
};

document.addEventListener("DOMContentLoaded", () => {
  if (typeof Search === "undefined") return; // on all pages but that of the search
  const summaryOfPage = Search.makeSearchSummary;
  Search.makeSearchSummary = (html, keywords, anchor) => {
    const words = [...keywords].map((word) => word.toLowerCase());
    const section = !anchor && words.length ? findSection(html, words) : null;
    if (!section) return summaryOfPage(html, keywords, anchor);
    const summary = summaryOfPage(html, keywords, `#${CSS.escape(section.id)}`);
    queueMicrotask(() => {
      const link = summary.parentElement.querySelector("a");
      const others = [...Search.output.querySelectorAll("a")].filter((x) => x !== link);
      link.href += `#${section.id}`;
      link.textContent += ` > ${headingOf(section)}`;
      // Sphinx may have found the same section by its title.
      if (others.some((x) => x.href === link.href)) link.closest("li").remove();
    });
    return summary;
  };
});
