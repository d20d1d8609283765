// What the files that gather call of each other.

#ifndef SHOAL_GATHER_H
#define SHOAL_GATHER_H

#include <stddef.h>
#include <stdint.h>

int64_t shoal_gather_parts(const char *const *bases, const int64_t *lengths, int64_t num_parts, const int32_t *part,
                           const int64_t *row, size_t count, size_t row_bytes, char *out, size_t threads);

int64_t shoal_gather_windows(const char *const *bases, const int64_t *lengths, int64_t num_parts, const int32_t *part,
                             const int64_t *start, size_t count, size_t width, int token_bytes, int is_signed,
                             char *out, size_t threads);

void shoal_permute(const int64_t *positions, int64_t *samples, size_t count, uint64_t n, uint64_t a, uint64_t b,
                   const uint64_t *keys, size_t num_keys);

size_t shoal_locate(const int64_t *rows, size_t count, const int64_t *starts, size_t num_parts, int32_t *part,
                    int64_t *row_in_part);

#endif
