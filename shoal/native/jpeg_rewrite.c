// The header of a JPEG that is cut into segments: its markers as they were, with DRI and DHT written anew.
//
// A segment's first DC differences count from 0, so they are larger than any that the image had before, and tables that
// were made for one image may lack such sizes. A table never uses the code of all ones (the standard forbids it), so
// codes can be added behind it, and none that is in use changes:
//
//   sizes 0, 1, 2 as 0, 10, 110; 111 is free. Size 3 becomes 1110, size 4 11110, and so on.

#include <string.h>

#include "jpeg.h"

enum { MOST_DC_SIZE = 11 };  // of 8-bit samples

// Writes down the codes of a table, shortest first; returns the first that is free, of its longest code's length.
static int32_t read_codes(const HuffmanText *text, DcCodes *codes, int *longest) {
    int32_t code = 0, place = 0, next = 0;
    memset(codes, 0, sizeof *codes);
    *longest = 1;
    for (int length = 1; length <= 16; length++, code <<= 1) {
        for (int i = 0; i < text->counts[length - 1]; i++, code++, place++) {
            int size = text->symbols[place] & 15;
            codes->code[size] = (uint16_t)code, codes->length[size] = (uint8_t)length;
        }
        if (text->counts[length - 1]) *longest = length, next = code;
    }
    return next;
}

int jpeg_extend_dc(const Huffman *table, HuffmanText *text, DcCodes *codes) {
    int longest;
    memcpy(text->counts, table->counts, 16);
    text->num_symbols = 0;
    for (int i = 0; i < 16; i++) text->num_symbols += text->counts[i];
    memcpy(text->symbols, table->symbols, (size_t)text->num_symbols);
    for (int i = 0; i < text->num_symbols; i++)
        if (text->symbols[i] > 15) return JPEG_UNSUPPORTED;
    if (text->num_symbols > 16) return JPEG_UNSUPPORTED;
    int32_t next = read_codes(text, codes, &longest);
    for (int size = 0; size <= MOST_DC_SIZE; size++) {
        if (codes->length[size]) continue;
        while (longest < 16 && next >= (1 << longest) - 1) longest++, next <<= 1;
        if (next >= (1 << longest) - 1) break;  // no room: who needs this size is left to libjpeg
        text->counts[longest - 1]++;
        text->symbols[text->num_symbols++] = (uint8_t)size;
        next++;
    }
    read_codes(text, codes, &longest);
    return JPEG_OK;
}

static uint8_t *write_marker(uint8_t *to, int marker, const uint8_t *content, size_t bytes) {
    *to++ = 0xFF, *to++ = (uint8_t)marker;
    *to++ = (uint8_t)((bytes + 2) >> 8), *to++ = (uint8_t)(bytes + 2);
    memcpy(to, content, bytes);
    return to + bytes;
}

static uint8_t *write_table(uint8_t *to, int number, const uint8_t *counts, const uint8_t *symbols) {
    uint8_t content[17 + 256] = {(uint8_t)number};
    size_t num_symbols = 0;
    memcpy(content + 1, counts, 16);
    for (int i = 0; i < 16; i++) num_symbols += counts[i];
    memcpy(content + 17, symbols, num_symbols);
    return write_marker(to, 0xC4, content, 17 + num_symbols);
}

uint8_t *jpeg_write_header(const Header *header, int restart, const HuffmanText dc[2], uint8_t *to) {
    const uint8_t *at = header->data + 2, *end = header->data + header->size;
    uint8_t interval[2] = {(uint8_t)(restart >> 8), (uint8_t)restart};
    Marker found = {0};
    *to++ = 0xFF, *to++ = 0xD8;
    while (jpeg_next_marker(&at, end, &found) == JPEG_OK && found.marker != 0xDA) {
        if (found.marker == 0xC4 || found.marker == 0xDD || is_alone(found.marker)) continue;
        to = write_marker(to, found.marker, found.at, (size_t)(found.end - found.at));
    }
    to = write_marker(to, 0xDD, interval, 2);
    for (int number = 0; number < 2; number++) {
        int has_dc = 0, has_ac = 0;
        for (int i = 0; i < header->num_planes; i++)
            has_dc |= header->dc[i] == number, has_ac |= header->ac[i] == number;
        const Huffman *ac = &header->tables[1][number];
        if (has_dc) to = write_table(to, number, dc[number].counts, dc[number].symbols);
        if (has_ac) to = write_table(to, 16 + number, ac->counts, ac->symbols);
    }
    return write_marker(to, 0xDA, found.at, (size_t)(found.end - found.at));
}
