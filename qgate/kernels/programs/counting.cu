// Count patterns in a table that a block has in shared memory.

// Add a word's numbers to the table.
template <int WIDTH>
__device__ __forceinline__ void count_word(unsigned *table, unsigned word, unsigned part, unsigned bits)
{
#pragma unroll
    for (int shift = 0; shift < 32; shift += WIDTH) {
        const unsigned pattern = (word >> shift) & ((1u << WIDTH) - 1);
        add_one(table, pattern & ((1u << bits) - 1), pattern >> bits == part);
    }
}

template <int WIDTH>
__device__ __forceinline__ void count_vector(unsigned *table, uint4 v, unsigned part, unsigned bits)
{
    count_word<WIDTH>(table, v.x, part, bits);
    count_word<WIDTH>(table, v.y, part, bits);
    count_word<WIDTH>(table, v.z, part, bits);
    count_word<WIDTH>(table, v.w, part, bits);
}

// A block counts the patterns whose leading bits are `part`, of its share of the numbers. Numbers
// before the first and after the last whole 16 bytes are counted by the first share.
template <int WIDTH, class Number>
__device__ __forceinline__ void count_patterns(
    const Number *__restrict__ x, count_t *total, long long n, long long shares, unsigned bits)
{
    SHARED(unsigned, table);
    const unsigned counters = 1u << bits, part = blockIdx.x / shares, share = blockIdx.x % shares;
    for (unsigned i = threadIdx.x; i < counters; i += blockDim.x)
        table[i] = 0;
    __syncthreads();

    const long long before = (16 - (size_t)x % 16) % 16 / sizeof(Number);
    const long long head = before < n ? before : n;
    const long long vectors = (n - head) / (16 / (long long)sizeof(Number));
    const uint4 *body = (const uint4 *)(x + head);
    const long long step = shares * blockDim.x;
    long long i = (long long)share * blockDim.x + threadIdx.x;
    for (; i + 3 * step < vectors; i += 4 * step) {
        const uint4 a = body[i], b = body[i + step], c = body[i + 2 * step], d = body[i + 3 * step];
        count_vector<WIDTH>(table, a, part, bits);
        count_vector<WIDTH>(table, b, part, bits);
        count_vector<WIDTH>(table, c, part, bits);
        count_vector<WIDTH>(table, d, part, bits);
    }
    for (; i < vectors; i += step)
        count_vector<WIDTH>(table, body[i], part, bits);
    if (share == 0) {
        const long long tail = head + vectors * (16 / (long long)sizeof(Number));
        for (long long k = threadIdx.x; k < head + n - tail; k += blockDim.x) {
            const unsigned pattern = x[k < head ? k : tail + k - head];
            add_one(table, pattern & (counters - 1), pattern >> bits == part);
        }
    }
    __syncthreads();

    // Shares begin at different counters, so that they do not wait for each other.
    for (unsigned k = threadIdx.x; k < counters; k += blockDim.x) {
        const unsigned at = (k + share * 256) & (counters - 1), count = table[at];
        if (count)
            atomicAdd(total + ((size_t)part << bits) + at, (count_t)count);
    }
}

extern "C" __global__ void __launch_bounds__(1024) count_16_bits(
    const unsigned short *x, count_t *total, long long n, long long shares, long long bits)
{
    count_patterns<16>(x, total, n, shares, (unsigned)bits);
}

extern "C" __global__ void __launch_bounds__(1024) count_8_bits(
    const unsigned char *x, count_t *total, long long n, long long shares, long long bits)
{
    count_patterns<8>(x, total, n, shares, (unsigned)bits);
}
