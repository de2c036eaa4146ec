/* Search results of a page's text lead to the section that holds the words.
 *
 * Sphinx's index knows words by page and titles by section. It fetches each page that
 * it found to show some of its text: here the section is found in that page.
 */
"use strict";

const summaryOfPage = Search.makeSearchSummary;

/** The smallest section that holds all words, or else the first of them. */
const findSection = (html, words) => {
  const page = new DOMParser().parseFromString(html, "text/html");
  const sections = [...page.querySelectorAll('[role="main"] section[id]')];
  const holds = (section, some) =>
    some.every((word) => section.textContent.toLowerCase().includes(word));
  const found = sections.filter((section) => holds(section, words));
  const usable = found.length ? found : sections.filter((x) => holds(x, [words[0]]));
  const smallest = usable.filter(
    (section) => !usable.some((x) => x !== section && section.contains(x)),
  )[0];
  return smallest && smallest.parentElement.closest("section") ? smallest : null;
};

Search.makeSearchSummary = (html, keywords, anchor) => {
  const words = [...keywords].map((word) => word.toLowerCase());
  const section = !anchor && words.length ? findSection(html, words) : null;
  if (!section) return summaryOfPage(html, keywords, anchor);
  const summary = summaryOfPage(html, keywords, `#${CSS.escape(section.id)}`);
  queueMicrotask(() => {
    const link = summary.parentElement.querySelector("a");
    const heading = section.querySelector("h1, h2, h3, h4").cloneNode(true);
    heading.querySelectorAll("a.headerlink").forEach((mark) => mark.remove());
    link.href += `#${section.id}`;
    link.textContent += ` > ${heading.textContent.trim()}`;
  });
  return summary;
};
