// A document and a question to begin with. Nobody wrote the logbook: it is made up, sentence by sentence.

import { request } from "./api.js";

export const SAMPLE = {
  name: "Logbook of a lighthouse",
  address: "/web/sample.txt",
  length: 128, // tokens of an answer: small models don't come to an end
  room: 100, // tokens for the question, the template and the answer
  question: "What is the secret code for the lantern room?",
  more: ["When was the lighthouse built?", "Who is the captain of the ferry?"], // SmolLM2 answers these, in any order
  moreOfDemo: ["What is the name of the new inspector?", "What is the name of the cat?"],
};

/** Whether a turn, or what is in the composer, is the sample and nothing else. */
export const isSample = ({ question, documents }) =>
  question === SAMPLE.question && documents.length === 1 && documents[0].name === SAMPLE.name;

export const sampleText = async () => (await request(SAMPLE.address)).text();
