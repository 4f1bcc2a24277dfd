#include "lockstep/net/socket/records.h"

#include <fmt/format.h>
#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <sodium.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

#include "lockstep/base/check.h"
#include "lockstep/base/error.h"
#include "lockstep/base/hash/crc32c.h"
#include "lockstep/wire/bytes.h"

namespace lockstep {
namespace {

constexpr std::size_t kTagBytes = 16;
constexpr std::size_t kChecksumBytes = 4;
static_assert(kMostRecordTailBytes == kTagBytes);
// Bytes that are sealed at once: what is handed to the system in one call.
constexpr std::size_t kSealAtOnce = 4 * kRecordBytes;
// Connections that say little keep little memory; those that stream get more.
constexpr std::size_t kLeastRoom = 4 * 1024;
constexpr std::size_t kMostRoom = 256 * 1024;
// A key serves for 16 GiB at most, far from what AES-GCM allows; see docs/mesh_protocol.md.
constexpr std::uint64_t kRecordsPerKey = std::uint64_t{1} << 20;
// Of the first word of a record: its bytes below, what they become when decompressed above.
constexpr unsigned kPlainShift = 16;
constexpr char kNextKey[] = "lockstep next key 1\n";

unsigned char* bytes_of(std::byte* data) { return reinterpret_cast<unsigned char*>(data); }
const unsigned char* bytes_of(const std::byte* data) {
  return reinterpret_cast<const unsigned char*>(data);
}

void require(int result) {
  if (result != 1) throw Error(ErrorCode::kIo, "OpenSSL refuses AES-256-GCM");
}

// OpenSSL is not to be taken down by exit(): threads that still hold connections then would lose
// its state under their feet.
EVP_CIPHER_CTX* new_context() {
  static const int ready = ::OPENSSL_init_crypto(OPENSSL_INIT_NO_ATEXIT, nullptr);
  require(ready);
  return ::EVP_CIPHER_CTX_new();
}

}  // namespace

// The nonce is the number of the record under its key, which both sides count.
class RecordCipher {
 public:
  RecordCipher(const RecordKey& key, bool seals)
      : context_(new_context(), ::EVP_CIPHER_CTX_free), key_(key), seals_(seals) {
    if (context_ == nullptr) throw std::bad_alloc();
    require(::EVP_CipherInit_ex(context_.get(), ::EVP_aes_256_gcm(), nullptr, bytes_of(key_.data()),
                                nullptr, seals_ ? 1 : 0));
  }
  ~RecordCipher() { ::sodium_memzero(key_.data(), key_.size()); }
  RecordCipher(const RecordCipher&) = delete;
  RecordCipher& operator=(const RecordCipher&) = delete;

  // One record: begin() with its head, update() for its parts, then one of the two ends.
  void begin(std::span<const std::byte, kRecordHeadBytes> head) {
    if (number_ == kRecordsPerKey) change_key();
    std::array<std::byte, 12> nonce{};
    store_little_endian(nonce.data(), number_++);
    require(
        ::EVP_CipherInit_ex(context_.get(), nullptr, nullptr, nullptr, bytes_of(nonce.data()), -1));
    int moved = 0;
    require(::EVP_CipherUpdate(context_.get(), nullptr, &moved, bytes_of(head.data()),
                               static_cast<int>(head.size())));
  }
  void update(std::span<const std::byte> from, std::byte* to) {
    int moved = 0;
    if (from.empty()) return;
    require(::EVP_CipherUpdate(context_.get(), bytes_of(to), &moved, bytes_of(from.data()),
                               static_cast<int>(from.size())));
  }
  void finish_sealing(std::byte* tag) {
    int moved = 0;
    require(::EVP_CipherFinal_ex(context_.get(), nullptr, &moved));
    require(::EVP_CIPHER_CTX_ctrl(context_.get(), EVP_CTRL_AEAD_GET_TAG, kTagBytes, tag));
  }
  bool finish_opening(const std::byte* tag) {
    int moved = 0;
    require(::EVP_CIPHER_CTX_ctrl(context_.get(), EVP_CTRL_AEAD_SET_TAG, kTagBytes,
                                  const_cast<std::byte*>(tag)));
    return ::EVP_CipherFinal_ex(context_.get(), nullptr, &moved) == 1;
  }

 private:
  void change_key() {
    RecordKey next;
    ::crypto_auth_hmacsha256(bytes_of(next.data()),
                             reinterpret_cast<const unsigned char*>(kNextKey), sizeof(kNextKey) - 1,
                             bytes_of(key_.data()));
    key_ = next;
    ::sodium_memzero(next.data(), next.size());
    number_ = 0;
    require(::EVP_CipherInit_ex(context_.get(), nullptr, nullptr, bytes_of(key_.data()), nullptr,
                                seals_ ? 1 : 0));
  }

  const std::unique_ptr<EVP_CIPHER_CTX, decltype(&::EVP_CIPHER_CTX_free)> context_;
  RecordKey key_;
  const bool seals_;
  std::uint64_t number_ = 0;
};

namespace {

std::unique_ptr<RecordCipher> cipher_of(const std::optional<RecordKey>& key, bool seals) {
  return key ? std::make_unique<RecordCipher>(*key, seals) : nullptr;
}

std::size_t tail_bytes(const std::unique_ptr<RecordCipher>& cipher) {
  return cipher ? kTagBytes : kChecksumBytes;
}

[[noreturn]] void refuse_record(const std::string& what) {
  throw Error(ErrorCode::kPeerLost,
              fmt::format("what came from it was damaged or changed on the way: {}", what));
}

}  // namespace

RecordSealer::RecordSealer(const std::optional<RecordKey>& key) : cipher_(cipher_of(key, true)) {}
RecordSealer::~RecordSealer() = default;
RecordSealer::RecordSealer(RecordSealer&&) noexcept = default;

void RecordSealer::set_compression(bool on) {
  if (on && compressor_ == nullptr) compressor_ = std::make_unique<Compressor>();
  if (!on) compressor_.reset();
}

void RecordSealer::seal(std::span<const std::byte> head, std::span<const std::byte> body) {
  LOCKSTEP_CHECK(unsent().empty() && sealed_ == 0);
  end_ = sent_ = 0;
  body = body.first(std::min(body.size(), kSealAtOnce));
  const std::size_t total = head.size() + body.size();
  const std::size_t records = (total + kRecordBytes - 1) / kRecordBytes;
  const std::size_t room = total + records * (kRecordHeadBytes + kMostRecordTailBytes);
  if (out_.size() < room) out_.resize(room);
  while (!head.empty() || !body.empty()) {
    const auto first = head.first(std::min(head.size(), kRecordBytes));
    const auto second = body.first(std::min(body.size(), kRecordBytes - first.size()));
    seal_record(first, second);
    head = head.subspan(first.size());
    body = body.subspan(second.size());
  }
  sealed_ = total;
}

void RecordSealer::seal_record(std::span<const std::byte> head, std::span<const std::byte> body) {
  std::uint32_t plain = 0;  // bytes of a record that is compressed
  if (const auto compressed = compress(head, body); !compressed.empty()) {
    plain = static_cast<std::uint32_t>(head.size() + body.size());
    head = {};
    body = compressed;
  }
  const std::size_t size = head.size() + body.size();
  std::byte* const record = out_.data() + end_;
  std::byte* const data = record + kRecordHeadBytes;
  end_ += kRecordHeadBytes + size + tail_bytes(cipher_);
  store_little_endian(record, static_cast<std::uint32_t>(size) | plain << kPlainShift);
  if (cipher_) {
    cipher_->begin(std::span<const std::byte, kRecordHeadBytes>(record, kRecordHeadBytes));
    cipher_->update(head, data);
    cipher_->update(body, data + head.size());
    cipher_->finish_sealing(data + size);
    return;
  }
  std::uint32_t checksum = crc32c({record, kRecordHeadBytes});
  checksum = crc32c_copy(data, head, checksum);
  checksum = crc32c_copy(data + head.size(), body, checksum);
  store_little_endian(data + size, checksum);
}

std::span<const std::byte> RecordSealer::compress(std::span<const std::byte> head,
                                                  std::span<const std::byte> body) {
  if (compressor_ == nullptr) return {};
  const auto began = std::chrono::steady_clock::now();
  if (!head.empty()) {
    joined_.assign(head.begin(), head.end());
    joined_.insert(joined_.end(), body.begin(), body.end());
    body = joined_;
  }
  const auto compressed = compressor_->compress(body);
  cost_.bytes += body.size();
  cost_.time += std::chrono::steady_clock::now() - began;
  return compressed;
}

std::size_t RecordSealer::take_done() { return unsent().empty() ? std::exchange(sealed_, 0) : 0; }

RecordOpener::RecordOpener(const std::optional<RecordKey>& key)
    : cipher_(cipher_of(key, false)), in_(kLeastRoom) {}
RecordOpener::~RecordOpener() = default;
RecordOpener::RecordOpener(RecordOpener&&) noexcept = default;

void RecordOpener::received(std::size_t bytes) {
  LOCKSTEP_CHECK(bytes <= in_.size() - end_);
  end_ += bytes;
}

std::optional<RecordOpener::Front> RecordOpener::front() const {
  if (end_ - begin_ < kRecordHeadBytes) return std::nullopt;
  const auto head = load_little_endian<std::uint32_t>(in_.data() + begin_);
  const std::uint32_t stored = head & ((1U << kPlainShift) - 1), plain = head >> kPlainShift;
  const bool fits = stored > 0 && std::max(stored, plain) <= kRecordBytes;
  return Front{stored, plain == 0 ? stored : plain, fits && (plain == 0 || stored < plain)};
}

std::size_t RecordOpener::size_of(const Front& record) const {
  return kRecordHeadBytes + record.stored + tail_bytes(cipher_);
}

bool RecordOpener::is_whole(const Front& record) const { return end_ - begin_ >= size_of(record); }

bool RecordOpener::ready() const {
  if (taken_ < plain_.size()) return true;
  const std::optional<Front> record = front();
  return record && (!record->valid || is_whole(*record));  // open() refuses one that is not valid
}

std::size_t RecordOpener::open(std::span<std::byte> head, std::span<std::byte> body) {
  std::size_t done = 0;
  const auto take = [&](std::size_t bytes) {
    const std::size_t in_head = std::min(bytes, head.size());
    head = head.subspan(in_head);
    body = body.subspan(bytes - in_head);
    done += bytes;
  };
  while (!head.empty() || !body.empty()) {
    const std::size_t wanted = head.size() + body.size();
    if (const std::size_t left = std::min(wanted, plain_.size() - taken_); left > 0) {
      const std::byte* from = plain_.data() + taken_;
      const std::size_t in_head = std::min(left, head.size());
      std::copy_n(from, in_head, head.begin());
      std::copy_n(from + in_head, left - in_head, body.begin());
      taken_ += left;
      take(left);
      continue;
    }
    const std::optional<Front> record = front();
    if (record && !record->valid) {
      refuse_record(fmt::format("a record of {} bytes, {} in all", record->stored, record->plain));
    }
    if (!record || !is_whole(*record)) break;
    if (record->plain <= wanted) {
      const std::size_t in_head = std::min(record->plain, head.size());
      open_record(*record, head.first(in_head), body.first(record->plain - in_head));
      take(record->plain);
    } else {
      plain_.resize(record->plain);
      taken_ = record->plain;  // nothing is there if this throws
      open_record(*record, {}, plain_);
      taken_ = 0;
    }
    begin_ += size_of(*record);
  }
  if (done == 0) make_room();
  return done;
}

void RecordOpener::open_record(const Front& record, std::span<std::byte> head,
                               std::span<std::byte> body) {
  if (!record.compressed()) return open_stored(head, body);
  if (decompressor_ == nullptr) decompressor_ = std::make_unique<Decompressor>();
  stored_.resize(record.stored);
  open_stored({}, stored_);
  std::span<std::byte> plain = body;
  if (!head.empty()) {
    joined_.resize(record.plain);
    plain = joined_;
  }
  if (!decompressor_->decompress(stored_, plain))
    refuse_record("a record that cannot be decompressed");
  if (!head.empty()) {
    std::ranges::copy(plain.first(head.size()), head.begin());
    std::ranges::copy(plain.subspan(head.size()), body.begin());
  }
}

void RecordOpener::open_stored(std::span<std::byte> head, std::span<std::byte> body) {
  const std::span record = std::span(std::as_const(in_)).subspan(begin_);
  const std::byte* const data = record.data() + kRecordHeadBytes;
  const std::size_t size = head.size() + body.size();
  if (cipher_) {
    cipher_->begin(record.first<kRecordHeadBytes>());
    cipher_->update({data, head.size()}, head.data());
    cipher_->update({data + head.size(), body.size()}, body.data());
    if (!cipher_->finish_opening(data + size)) refuse_record("a record that is not authentic");
    return;
  }
  std::uint32_t checksum = crc32c(record.first(kRecordHeadBytes));
  checksum = crc32c_copy(head.data(), {data, head.size()}, checksum);
  checksum = crc32c_copy(body.data(), {data + head.size(), body.size()}, checksum);
  if (checksum != load_little_endian<std::uint32_t>(data + size)) {
    refuse_record("a record whose checksum is another one");
  }
}

// What is left goes to the front; a peer that fills all room gets more.
void RecordOpener::make_room() {
  const bool filled = end_ == in_.size();
  if (begin_ > 0) {
    std::memmove(in_.data(), in_.data() + begin_, end_ - begin_);
    end_ -= std::exchange(begin_, 0);
  }
  if (filled && in_.size() < kMostRoom) in_.resize(2 * in_.size());
}

Records::Records(const std::optional<RecordKeys>& keys)
    : sealer(keys ? std::optional(keys->sending) : std::nullopt),
      opener(keys ? std::optional(keys->receiving) : std::nullopt) {}

}  // namespace lockstep
