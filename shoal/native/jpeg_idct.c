// The inverse cosine transform of a block: the one that libjpeg takes by default ("slow", jidctint), bit for bit.
//
// 1. Down the columns: the even rows give (tmp0 + tmp3, tmp1 + tmp2, tmp1 - tmp2, tmp0 - tmp3), the odd rows four sums
//    of products; sum and difference of the two are rows 0..3 and 7..4. Constants have 13 bits, what is kept 2 more.
// 2. Along the rows, the same; then 128 is added and the result cut to 0..255.
//
// libjpeg factors the odd part to save multiplications; integers let us expand it into products of pairs, which one
// instruction multiplies and adds. A block that holds only its DC, 80: 80 << 2 = 320 in every place of column 0 after
// step 1, and (320 + 16 >> 5) + 128 = 138 everywhere after step 2.

#include <string.h>

#include "jpeg.h"

#if defined(__x86_64__) && defined(__GNUC__)
#define HAS_AVX2 1
#include <immintrin.h>
#endif

enum { EVEN_A = 4433, EVEN_B = 4433 - 15137, EVEN_C = 4433 + 6270, ONE = 1 << 13 };

// Of rows (1, 5, 3, 7): what is added to, and taken from, the even part for rows 0 and 7, 1 and 6, 2 and 5, 3 and 4.
static const int16_t ODD[4][4] = {
    {11363, 6437, 9633, 2260}, {9633, -11362, -2259, -6436}, {6437, 2261, -11362, 9633}, {2260, 9633, -6436, -11363}};

static int16_t saturate(int32_t value) { return (int16_t)(value < -32768 ? -32768 : value > 32767 ? 32767 : value); }

// Eight columns: `in` holds their pairs (0, 4), (2, 6), (1, 5), (3, 7). Sums wrap, as instructions do.
static void transform(const int16_t in[64], int32_t out[8][8], int shift) {
    uint32_t half = 1u << (shift - 1);
    for (int column = 0; column < 8; column++) {
        const int16_t *a = in + 2 * column, *b = a + 16, *c = a + 32, *d = a + 48;
        uint32_t tmp0 = (uint32_t)((a[0] + a[1]) * ONE) + half, tmp1 = (uint32_t)((a[0] - a[1]) * ONE) + half;
        uint32_t tmp2 = (uint32_t)(b[0] * EVEN_A + b[1] * EVEN_B), tmp3 = (uint32_t)(b[0] * EVEN_C + b[1] * EVEN_A);
        uint32_t even[4] = {tmp0 + tmp3, tmp1 + tmp2, tmp1 - tmp2, tmp0 - tmp3};
        for (int i = 0; i < 4; i++) {
            uint32_t odd = (uint32_t)(c[0] * ODD[i][0] + c[1] * ODD[i][1]);
            odd += (uint32_t)(d[0] * ODD[i][2] + d[1] * ODD[i][3]);
            out[i][column] = (int32_t)(even[i] + odd) >> shift, out[7 - i][column] = (int32_t)(even[i] - odd) >> shift;
        }
    }
}

// Where the first coefficient of each row of a block lies; those after it lie two apart.
static const uint8_t GROUPS[8] = {0, 32, 16, 48, 1, 33, 17, 49};

static void idct_portable(const int16_t *block, uint8_t *out, ptrdiff_t stride) {
    int16_t turned[64];
    int32_t found[8][8];
    transform(block, found, 13 - 2);
    for (int row = 0; row < 8; row++)
        for (int column = 0; column < 8; column++) turned[GROUPS[column] + 2 * row] = saturate(found[row][column]);
    transform(turned, found, 13 + 2 + 3);
    for (int row = 0; row < 8; row++) {
        for (int column = 0; column < 8; column++) {
            int sample = found[column][row] + 128;
            out[row * stride + column] = (uint8_t)(sample < 0 ? 0 : sample > 255 ? 255 : sample);
        }
    }
}

#ifdef HAS_AVX2
#define FOR_AVX2 __attribute__((target("avx2")))

FOR_AVX2 static inline __m256i pair_of(int first, int second) {
    return _mm256_set1_epi32((int32_t)((uint32_t)(uint16_t)second << 16 | (uint16_t)first));
}

// Eight columns at once; a, b, c, d hold the pairs (0, 4), (2, 6), (1, 5), (3, 7) of each.
FOR_AVX2 static inline void transform_avx2(__m256i a, __m256i b, __m256i c, __m256i d, __m256i out[8], int shift) {
    __m256i half = _mm256_set1_epi32(1 << (shift - 1));
    __m256i tmp0 = _mm256_add_epi32(_mm256_madd_epi16(a, pair_of(ONE, ONE)), half);
    __m256i tmp1 = _mm256_add_epi32(_mm256_madd_epi16(a, pair_of(ONE, -ONE)), half);
    __m256i tmp2 = _mm256_madd_epi16(b, pair_of(EVEN_A, EVEN_B)), tmp3 = _mm256_madd_epi16(b, pair_of(EVEN_C, EVEN_A));
    __m256i even[4] = {_mm256_add_epi32(tmp0, tmp3), _mm256_add_epi32(tmp1, tmp2), _mm256_sub_epi32(tmp1, tmp2),
                       _mm256_sub_epi32(tmp0, tmp3)};
    for (int i = 0; i < 4; i++) {
        __m256i odd = _mm256_add_epi32(_mm256_madd_epi16(c, pair_of(ODD[i][0], ODD[i][1])),
                                       _mm256_madd_epi16(d, pair_of(ODD[i][2], ODD[i][3])));
        out[i] = _mm256_srai_epi32(_mm256_add_epi32(even[i], odd), shift);
        out[7 - i] = _mm256_srai_epi32(_mm256_sub_epi32(even[i], odd), shift);
    }
}

FOR_AVX2 static inline void store_two_rows(__m128i rows, uint8_t *out, ptrdiff_t stride) {
    _mm_storel_epi64((__m128i *)out, rows);
    _mm_storel_epi64((__m128i *)(out + stride), _mm_unpackhi_epi64(rows, rows));
}

FOR_AVX2 static void idct_avx2(const int16_t *block, uint8_t *out, ptrdiff_t stride) {
    const __m256i *in = (const __m256i *)block;
    __m256i w[8];
    transform_avx2(_mm256_loadu_si256(in), _mm256_loadu_si256(in + 1), _mm256_loadu_si256(in + 2),
                   _mm256_loadu_si256(in + 3), w, 13 - 2);
    // w[r] holds row r; what follows turns rows into columns, in the pairs that the second step wants.
    __m256i r04 = _mm256_packs_epi32(w[0], w[4]), r15 = _mm256_packs_epi32(w[1], w[5]);
    __m256i r26 = _mm256_packs_epi32(w[2], w[6]), r37 = _mm256_packs_epi32(w[3], w[7]);
    __m256i r01 = _mm256_unpacklo_epi16(r04, r15), r45 = _mm256_unpackhi_epi16(r04, r15);
    __m256i r23 = _mm256_unpacklo_epi16(r26, r37), r67 = _mm256_unpackhi_epi16(r26, r37);
    __m256i upper_0145 = _mm256_unpacklo_epi32(r01, r23), upper_2367 = _mm256_unpackhi_epi32(r01, r23);
    __m256i lower_0145 = _mm256_unpacklo_epi32(r45, r67), lower_2367 = _mm256_unpackhi_epi32(r45, r67);
    __m256i c01 = _mm256_permute2x128_si256(upper_0145, lower_0145, 0x20);
    __m256i c45 = _mm256_permute2x128_si256(upper_0145, lower_0145, 0x31);
    __m256i c23 = _mm256_permute2x128_si256(upper_2367, lower_2367, 0x20);
    __m256i c67 = _mm256_permute2x128_si256(upper_2367, lower_2367, 0x31);
    transform_avx2(_mm256_unpacklo_epi16(c01, c45), _mm256_unpacklo_epi16(c23, c67), _mm256_unpackhi_epi16(c01, c45),
                   _mm256_unpackhi_epi16(c23, c67), w, 13 + 2 + 3);
    // w[c] holds column c: down to bytes, four rows in each half, and back to rows.
    __m256i left = _mm256_packs_epi16(_mm256_packs_epi32(w[0], w[1]), _mm256_packs_epi32(w[2], w[3]));
    __m256i right = _mm256_packs_epi16(_mm256_packs_epi32(w[4], w[5]), _mm256_packs_epi32(w[6], w[7]));
    __m256i turn = _mm256_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15,  //
                                    0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    __m256i add_128 = _mm256_set1_epi8((char)0x80);
    left = _mm256_xor_si256(_mm256_shuffle_epi8(left, turn), add_128);
    right = _mm256_xor_si256(_mm256_shuffle_epi8(right, turn), add_128);
    __m256i r0145 = _mm256_unpacklo_epi32(left, right), r2367 = _mm256_unpackhi_epi32(left, right);
    store_two_rows(_mm256_castsi256_si128(r0145), out, stride);
    store_two_rows(_mm256_castsi256_si128(r2367), out + 2 * stride, stride);
    store_two_rows(_mm256_extracti128_si256(r0145, 1), out + 4 * stride, stride);
    store_two_rows(_mm256_extracti128_si256(r2367, 1), out + 6 * stride, stride);
}
#endif

// The fastest that this processor has.
Idct jpeg_idct(int portable) {
#ifdef HAS_AVX2
    if (!portable && __builtin_cpu_supports("avx2")) return idct_avx2;
#endif
    (void)portable;
    return idct_portable;
}

// For the tests: 64 coefficients in natural order, rows of eight.
void shoal_jpeg_idct(const int16_t *natural, uint8_t *out, int portable) {
    int16_t block[64];
    for (int i = 0; i < 64; i++) block[GROUPS[i / 8] + i % 8 * 2] = natural[i];
    jpeg_idct(portable)(block, out, 8);
}
