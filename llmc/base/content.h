// content.h: recognizes a file that was given in place of text, JSON or weights, by its first bytes.
#pragma once
#include <string_view>

struct ForeignContent {
    const char *what, *remedy;      // "a zip archive", "unpack it with unzip"
    bool is_text = false;           // true of HTML, which is a text, but neither JSON nor weights
    const char* package = nullptr;  // package with the program that unpacks it; null: there is none
    const char* command[4] = {};    // command that unpacks the standard input to the standard output
};

// Recognizes archives, packed files, web pages, git-lfs pointers, and files of arrays, tensors, tables and documents,
// by the first bytes of a file: 512 or more, or all. Returns null for any other content.
const ForeignContent* foreign_content(std::string_view start);
