// Which document each token of a window belongs to, and how whole documents fill rows of one length.

#include <stddef.h>
#include <stdint.h>

// The document that holds token `at`: the last one that begins at or before it (empty ones hold nothing).
static size_t document_at(const int64_t *offsets, size_t num_documents, int64_t at) {
    size_t low = 0, high = num_documents;
    while (high - low > 1) {
        size_t middle = low + (high - low) / 2;
        if (offsets[middle] <= at) low = middle;
        else high = middle;
    }
    return low;
}

// document[i][t] and position[i][t] of token start[i] + t of the stream of part[i], whose documents begin at
// offsets[part][0 .. num_documents]. Documents are counted from 0 in each window; what lies beyond length[i] belongs to
// document -1. Returns the first window that leaves its stream, or -1.
int64_t shoal_document_places(const int64_t *const *offsets, const int64_t *num_documents, int64_t num_parts,
                              const int32_t *part, const int64_t *start, const int64_t *length, size_t count,
                              size_t width, int32_t *document, int32_t *position) {
    for (size_t i = 0; i < count; i++) {
        const int32_t p = part[i];
        if (p < 0 || p >= num_parts || num_documents[p] < 1) return (int64_t)i;
        const int64_t *begin = offsets[p];
        const size_t last = (size_t)num_documents[p];
        if (length[i] < 0 || length[i] > (int64_t)width) return (int64_t)i;
        if (begin[0] < 0 || begin[last] < length[i]) return (int64_t)i;
        if (start[i] < begin[0] || start[i] > begin[last] - length[i]) return (int64_t)i;
        size_t at = document_at(begin, last, start[i]);
        int32_t number = 0;
        int32_t *const documents = document + i * width, *const positions = position + i * width;
        size_t t = 0;
        for (; t < (size_t)length[i]; t++) {
            const int64_t token = start[i] + (int64_t)t;
            if (t > 0 && at + 1 < last && token >= begin[at + 1]) {
                do at++;
                while (at + 1 < last && token >= begin[at + 1]);
                number++;
            }
            documents[t] = number;
            positions[t] = (int32_t)((uint64_t)token - (uint64_t)begin[at]);  // unsigned: damaged offsets say anything
        }
        for (; t < width; t++) documents[t] = -1, positions[t] = 0;
    }
    return -1;
}

// The end of the row of at most `width` tokens that begins at `begin`: behind the last document that fits into it whole,
// or, within one that does not, after `width` tokens. *document begins at or before `begin`; it moves to the end.
static int64_t end_of_row(const int64_t *offsets, size_t num_documents, int64_t width, int64_t begin,
                          size_t *document) {
    const int64_t limit = begin > INT64_MAX - width ? INT64_MAX : begin + width;  // damaged offsets say anything
    size_t last = *document, step = 1;
    for (; last + step <= num_documents && offsets[last + step] <= limit; step *= 2) last += step;
    for (; step > 0; step /= 2)
        if (last + step <= num_documents && offsets[last + step] <= limit) last += step;
    *document = last;
    return offsets[last] > begin || last == num_documents ? offsets[last] : limit;
}

// Fills rows with whole documents in their order. Writes where row 0, `every`, 2 x every, ... begins in the stream, at most
// `room` of them, and returns how many rows there are. offsets must not decrease.
size_t shoal_mark_rows(const int64_t *offsets, size_t num_documents, int64_t width, size_t every, int64_t *marks,
                       size_t room) {
    size_t count = 0, document = 0;
    if (num_documents == 0 || width < 1 || every < 1) return 0;
    for (int64_t begin = offsets[0]; begin < offsets[num_documents]; count++) {
        if (count % every == 0 && count / every < room) marks[count / every] = begin;
        begin = end_of_row(offsets, num_documents, width, begin, &document);
    }
    return count;
}

// The tokens [begin[i], end[i]) of row[i] of part[i], counted from the mark before it. Returns the first that is not
// there, or -1.
int64_t shoal_rows_at(const int64_t *const *offsets, const int64_t *num_documents, const int64_t *const *marks,
                      const int64_t *num_marks, int64_t num_parts, int64_t width, int64_t every, const int32_t *part,
                      const int64_t *row, size_t count, int64_t *begin, int64_t *end) {
    if (width < 1 || every < 1) return 0;
    for (size_t i = 0; i < count; i++) {
        const int32_t p = part[i];
        if (p < 0 || p >= num_parts || num_documents[p] < 1) return (int64_t)i;
        if (row[i] < 0 || row[i] / every >= num_marks[p]) return (int64_t)i;
        const size_t last = (size_t)num_documents[p];
        int64_t at = marks[p][row[i] / every];
        size_t document = document_at(offsets[p], last, at);
        for (int64_t k = row[i] % every; k > 0; k--) at = end_of_row(offsets[p], last, width, at, &document);
        begin[i] = at;
        end[i] = end_of_row(offsets[p], last, width, at, &document);
        if (end[i] <= begin[i]) return (int64_t)i;
    }
    return -1;
}
