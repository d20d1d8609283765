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
            positions[t] = (int32_t)(token - begin[at]);
        }
        for (; t < width; t++) documents[t] = -1, positions[t] = 0;
    }
    return -1;
}

// Fills rows of `width` tokens with whole documents in their order: each row takes documents until the next one does not
// fit. A document longer than a row is cut into pieces of a row. Writes where each row begins in the stream, and returns how
// many rows there are; at most `room` are written. offsets must not decrease.
size_t shoal_fill_rows(const int64_t *offsets, size_t num_documents, int64_t width, int64_t *rows, size_t room) {
    size_t count = 0;
    if (num_documents == 0 || width < 1) return 0;
    int64_t begin = offsets[0];  // of the row at hand
    for (size_t d = 0; d < num_documents; d++) {
        if (offsets[d + 1] - begin <= width) continue;
        if (offsets[d] > begin) {  // what came before this document is a row
            if (count < room) rows[count] = begin;
            count++;
            begin = offsets[d];
        }
        while (offsets[d + 1] - begin > width) {
            if (count < room) rows[count] = begin;
            count++;
            begin += width;
        }
    }
    if (offsets[num_documents] > begin) {
        if (count < room) rows[count] = begin;
        count++;
    }
    return count;
}
