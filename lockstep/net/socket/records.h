#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "lockstep/wire/compression.h"

namespace lockstep {

// Bytes of a connection as records, as docs/mesh_protocol.md has them: encrypted and authenticated
// with AES-256-GCM where there are keys, with a CRC-32C where there are none, and compressed before
// where the sender wants it. Between hosts; connections that stay on one host carry their bytes as
// they are. No I/O here.

inline constexpr std::size_t kRecordBytes = kMostCompressed;  // of plaintext, at most
inline constexpr std::size_t kRecordHeadBytes = 4;
inline constexpr std::size_t kMostRecordTailBytes = 16;  // a tag; a checksum has four

using RecordKey = std::array<std::byte, 32>;
struct RecordKeys {
  RecordKey sending;
  RecordKey receiving;
};

class RecordCipher;  // AES-256-GCM with a key that changes as records go by

// So many bytes were given to the compressor, and it took so long.
struct CompressionCost {
  std::size_t bytes = 0;
  std::chrono::steady_clock::duration time{};
};

// The sending side. Bytes are sealed a few records at a time, which then have to be sent whole
// before more can be sealed. Used by one thread at a time.
class RecordSealer {
 public:
  explicit RecordSealer(const std::optional<RecordKey>& key);
  ~RecordSealer();
  RecordSealer(RecordSealer&&) noexcept;

  // Records from now on are compressed where that saves something; not until this is called.
  void set_compression(bool on);
  // What compressing has cost since the last call.
  CompressionCost take_cost() { return std::exchange(cost_, {}); }

  // Seals as much of `head`, then of `body`, as goes out at once. Nothing may be unsent.
  void seal(std::span<const std::byte> head, std::span<const std::byte> body);
  // What is to be sent, and that so much of it has been.
  std::span<const std::byte> unsent() const { return {out_.data() + sent_, end_ - sent_}; }
  void sent(std::size_t bytes) { sent_ += bytes; }
  // How many bytes were sealed, once all their records are sent; 0 until then, and afterwards.
  std::size_t take_done();

 private:
  void seal_record(std::span<const std::byte> head, std::span<const std::byte> body);
  // Empty: the record is to travel as it is.
  std::span<const std::byte> compress(std::span<const std::byte> head,
                                      std::span<const std::byte> body);

  std::unique_ptr<RecordCipher> cipher_;    // null: checksums
  std::unique_ptr<Compressor> compressor_;  // null: nothing is compressed
  std::vector<std::byte> joined_;           // head and body of a record that is compressed
  CompressionCost cost_;
  std::vector<std::byte> out_;  // of which [sent_, end_) is to be sent
  std::size_t sent_ = 0;
  std::size_t end_ = 0;
  std::size_t sealed_ = 0;  // bytes that are in there
};

// The receiving side. Used by one thread at a time.
class RecordOpener {
 public:
  explicit RecordOpener(const std::optional<RecordKey>& key);
  ~RecordOpener();
  RecordOpener(RecordOpener&&) noexcept;

  // Where bytes of the connection belong, never empty after open() returned 0; and that so many
  // have come there.
  std::span<std::byte> room() { return std::span(in_).subspan(end_); }
  void received(std::size_t bytes);
  // Opens records that are whole, into `head`, then into `body`, and returns how many bytes.
  // Throws Error{kPeerLost} for a record that is damaged or was changed on the way.
  std::size_t open(std::span<std::byte> head, std::span<std::byte> body);
  // open() would return something.
  bool ready() const;

 private:
  // The record at the front.
  struct Front {
    std::size_t stored;  // its bytes on the way
    std::size_t plain;   // and what they become
    bool valid;
    bool compressed() const { return stored != plain; }
  };
  std::optional<Front> front() const;  // nothing: its head is not whole yet
  bool is_whole(const Front& record) const;
  std::size_t size_of(const Front& record) const;  // with all around it
  void open_record(const Front& record, std::span<std::byte> head, std::span<std::byte> body);
  // What the record has on the way, decrypted or checked.
  void open_stored(std::span<std::byte> head, std::span<std::byte> body);
  void make_room();

  std::unique_ptr<RecordCipher> cipher_;        // null: checksums
  std::unique_ptr<Decompressor> decompressor_;  // made when the first compressed record comes
  std::vector<std::byte> stored_;               // a compressed record
  std::vector<std::byte> joined_;               // what it becomes, where that goes to two places
  std::vector<std::byte> in_;                   // [begin_, end_) has come and is not opened yet
  std::size_t begin_ = 0;
  std::size_t end_ = 0;
  std::vector<std::byte> plain_;  // what is left of a record that did not fit, from taken_ on
  std::size_t taken_ = 0;
};

// Both sides of a connection; one thread may send while another receives.
struct Records {
  explicit Records(const std::optional<RecordKeys>& keys);

  RecordSealer sealer;
  RecordOpener opener;
};

}  // namespace lockstep
