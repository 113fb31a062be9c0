// xxh3_64 of the 1 MiB leaves of a chunk, with the same values as the xxhash library.
//
// Within 1 KiB the sums of xxh3 commute, so they are computed in parallel (digest_blocks). Only the
// step after each KiB is part of a chain (digest_scan, eight independent chains per leaf). Leaves
// of up to 240 bytes have formulas of their own (digest_merge). Written from the specification in
// doc/xxhash_spec.md of the xxHash repository, with seed 0 and the default secret.

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;

#define HIDDEN __device__ __forceinline__

#define LEAF_BYTES (1ull << 20)
#define BLOCK_BYTES 1024ull
#define STRIPE_BYTES 64ull
#define BLOCKS_PER_LEAF (LEAF_BYTES / BLOCK_BYTES)
#define LANES 8
#define LONGEST_SHORT 240ull

#define PRIME32_1 0x9E3779B1ull
#define PRIME32_2 0x85EBCA77ull
#define PRIME32_3 0xC2B2AE3Dull
#define PRIME64_1 0x9E3779B185EBCA87ull
#define PRIME64_2 0xC2B2AE3D27D4EB4Full
#define PRIME64_3 0x165667B19E3779F9ull
#define PRIME64_4 0x85EBCA77C2B2AE63ull
#define PRIME64_5 0x27D4EB2F165667C5ull
#define PRIME_MX1 0x165667919E3779F9ull
#define PRIME_MX2 0x9FB21C651E98DF25ull

// Not __constant__, because neighbouring threads read different words of it.
__device__ const u64 SECRET[24] = {
    0xbe4ba423396cfeb8ull, 0x1cad21f72c81017cull, 0xdb979083e96dd4deull, 0x1f67b3b7a4a44072ull,
    0x78e5c0cc4ee679cbull, 0x2172ffcc7dd05a82ull, 0x8e2443f7744608b8ull, 0x4c263a81e69035e0ull,
    0xcb00c391bb52283cull, 0xa32e531b8b65d088ull, 0x4ef90da297486471ull, 0xd8acdea946ef1938ull,
    0x3f349ce33f76faa8ull, 0x1d4f0bc7c7bbdcf9ull, 0x3159b4cd4be0518aull, 0x647378d9c97e9fc8ull,
    0xc3ebd33483acc5eaull, 0xeb6313faffa081c5ull, 0x49daf0b751dd0d17ull, 0x9e68d429265516d3ull,
    0xfca1477d58be162bull, 0xce31d07ad1b8f88full, 0x280416958f3acb45ull, 0x7e404bbbcafbd7afull,
};

__device__ const u64 STARTS[LANES] = {PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3,
                                      PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1};

// Returns eight bytes of the secret, from any byte on.
HIDDEN u64 secret(u32 at) {
  const u32 word = at / 8, bits = at % 8 * 8;
  if (!bits) return SECRET[word];
  return SECRET[word] >> bits | SECRET[word + 1] << (64 - bits);
}

HIDDEN u64 read64(const u8 *from) {
  if (!((u64)from & 7)) return *(const u64 *)from;
  u64 value = 0;
  for (int i = 0; i < 8; i++) value |= (u64)from[i] << 8 * i;
  return value;
}

HIDDEN u32 read32(const u8 *from) {
  return from[0] | (u32)from[1] << 8 | (u32)from[2] << 16 | (u32)from[3] << 24;
}

HIDDEN u64 fold_product(u64 a, u64 b) { return (a * b) ^ __umul64hi(a, b); }

HIDDEN u64 avalanche(u64 hash) {
  hash ^= hash >> 37;
  hash *= PRIME_MX1;
  return hash ^ hash >> 32;
}

HIDDEN u64 avalanche_64(u64 hash) {
  hash ^= hash >> 33;
  hash *= PRIME64_2;
  hash ^= hash >> 29;
  hash *= PRIME64_3;
  return hash ^ hash >> 32;
}

HIDDEN u64 rotated(u64 value, int bits) { return value << bits | value >> (64 - bits); }

HIDDEN u64 swapped(u64 value) {
  u64 out = 0;
  for (int i = 0; i < 8; i++) out = out << 8 | (value >> 8 * i & 0xFF);
  return out;
}

HIDDEN u64 mix16(const u8 *from, u32 at) {
  return fold_product(read64(from) ^ secret(at), read64(from + 8) ^ secret(at + 8));
}

// Returns the digest of 1 to 240 bytes.
HIDDEN u64 short_digest(const u8 *from, u32 num) {
  if (num <= 3) {
    const u32 both = (u32)from[0] << 16 | (u32)from[num >> 1] << 24 | from[num - 1] | num << 8;
    return avalanche_64((u64)both ^ (u64)((u32)secret(0) ^ (u32)secret(4)));
  }
  if (num <= 8) {
    const u64 both = read32(from + num - 4) + ((u64)read32(from) << 32);
    u64 keyed = both ^ secret(8) ^ secret(16);
    keyed ^= rotated(keyed, 49) ^ rotated(keyed, 24);
    keyed *= PRIME_MX2;
    keyed ^= (keyed >> 35) + num;
    keyed *= PRIME_MX2;
    return keyed ^ keyed >> 28;
  }
  if (num <= 16) {
    const u64 low = read64(from) ^ secret(24) ^ secret(32);
    const u64 high = read64(from + num - 8) ^ secret(40) ^ secret(48);
    return avalanche(num + swapped(low) + high + fold_product(low, high));
  }
  u64 sum = num * PRIME64_1;
  if (num <= 128) {
    for (u32 i = 0; i <= (num - 1) / 32; i++)
      sum += mix16(from + 16 * i, 32 * i) + mix16(from + num - 16 * (i + 1), 32 * i + 16);
    return avalanche(sum);
  }
  for (u32 i = 0; i < 8; i++) sum += mix16(from + 16 * i, 16 * i);
  sum = avalanche(sum);
  for (u32 i = 8; i < num / 16; i++) sum += mix16(from + 16 * i, 16 * (i - 8) + 3);
  return avalanche(sum + mix16(from + num - 16, 136 - 17));
}

HIDDEN u64 leaf_length(u64 num_bytes, u64 leaf) {
  const u64 left = num_bytes - leaf * LEAF_BYTES;
  return left < LEAF_BYTES ? left : LEAF_BYTES;
}

HIDDEN u64 stripe_sum(const u8 *stripe, u32 at, u32 lane) {
  const u64 keyed = read64(stripe + 8 * lane) ^ secret(at + 8 * lane);
  return read64(stripe + 8 * (lane ^ 1)) + (keyed & 0xFFFFFFFF) * (keyed >> 32);
}

// Computes the sum of one lane of one block of 1 KiB. Blocks are numbered through all leaves.
HIDDEN void digest_block(const u8 *data, u64 num_bytes, u64 *sums, u64 block, u32 lane) {
  const u64 leaf = block / BLOCKS_PER_LEAF, at = block % BLOCKS_PER_LEAF * BLOCK_BYTES;
  const u64 length = leaf_length(num_bytes, leaf);
  if (length <= LONGEST_SHORT) return;
  const u8 *from = data + leaf * LEAF_BYTES;
  const bool is_last = at + BLOCK_BYTES >= length;
  const u32 num_stripes = is_last ? (u32)((length - 1 - at) / STRIPE_BYTES) : 16;
  u64 sum = 0;
  for (u32 n = 0; n < num_stripes; n++) sum += stripe_sum(from + at + STRIPE_BYTES * n, 8 * n, lane);
  if (is_last) sum += stripe_sum(from + length - STRIPE_BYTES, 192 - 64 - 7, lane);
  sums[block * LANES + lane] = sum;
}

// Computes the chain of one lane of a leaf. Its end replaces the first sum of the lane.
HIDDEN void digest_chain(u64 num_bytes, u64 *sums, u64 leaf, u32 lane) {
  const u64 length = leaf_length(num_bytes, leaf);
  if (length <= LONGEST_SHORT) return;
  u64 *own = sums + leaf * BLOCKS_PER_LEAF * LANES + lane;
  const u64 num_scrambles = (length - 1) / BLOCK_BYTES, key = secret(128 + 8 * lane);
  u64 sum = STARTS[lane];
#pragma unroll 8
  for (u64 block = 0; block < num_scrambles; block++) {
    sum += own[block * LANES];
    sum = (sum ^ sum >> 47 ^ key) * PRIME32_1;
  }
  own[0] = sum + own[num_scrambles * LANES];
}

HIDDEN u64 digest_leaf(const u8 *data, u64 num_bytes, const u64 *sums, u64 leaf) {
  const u64 length = leaf_length(num_bytes, leaf);
  if (length <= LONGEST_SHORT) return short_digest(data + leaf * LEAF_BYTES, (u32)length);
  const u64 *own = sums + leaf * BLOCKS_PER_LEAF * LANES;
  u64 hash = length * PRIME64_1;
  for (u32 i = 0; i < 4; i++)
    hash += fold_product(own[2 * i] ^ secret(11 + 16 * i), own[2 * i + 1] ^ secret(19 + 16 * i));
  return avalanche(hash);
}

#ifdef __CUDACC__
extern "C" __global__ void __launch_bounds__(256)
    digest_blocks(const u8 *data, u64 num_bytes, u64 *sums) {
  const u64 thread = (u64)blockIdx.x * blockDim.x + threadIdx.x, block = thread / LANES;
  if (block * BLOCK_BYTES < num_bytes) digest_block(data, num_bytes, sums, block, thread % LANES);
}

extern "C" __global__ void digest_scan(u64 num_bytes, u64 *sums) {
  const u64 thread = (u64)blockIdx.x * blockDim.x + threadIdx.x, leaf = thread / LANES;
  if (leaf * LEAF_BYTES < num_bytes) digest_chain(num_bytes, sums, leaf, thread % LANES);
}

extern "C" __global__ void digest_merge(const u8 *data, u64 num_bytes, const u64 *sums, u64 *out) {
  const u64 leaf = (u64)blockIdx.x * blockDim.x + threadIdx.x;
  if (leaf * LEAF_BYTES < num_bytes) out[leaf] = digest_leaf(data, num_bytes, sums, leaf);
}
#endif
