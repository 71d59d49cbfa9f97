// A file that is written in random pieces is what was written, and so are its sums, whoever sums.
#include "hytrain/summed_file.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include "hytrain/crc32.h"

namespace {

void require(bool holds, const char* what) {
    if (!holds) {
        std::fprintf(stderr, "summed_file_test: %s\n", what);
        std::exit(1);
    }
}

void test_sums(std::mt19937& random, const std::vector<unsigned char>& content) {
    for (int i = 0; i < 2000; ++i) {
        const std::size_t at = random() % 5000, n = random() % 20000, cut = random() % (n + 1);
        const unsigned char* begin = content.data() + at;
        const std::uint32_t before = static_cast<std::uint32_t>(random());
        const std::uint32_t sum = hytrain::crc32(before, begin, n);
        require(sum == hytrain::crc32_portable(before, begin, n), "two ways give two sums");
        const std::uint32_t first = hytrain::crc32(before, begin, cut);
        const std::uint32_t second = hytrain::crc32(0, begin + cut, n - cut);
        require(sum == hytrain::crc32_joined(first, second, n - cut), "joined sums are others");
    }
}

void test_file(std::mt19937& random, const std::vector<unsigned char>& content) {
    std::string path =
        "summed_file_test.XXXXXX";  // beside the build: /tmp may have no direct writes
    const int descriptor = mkstemp(path.data());
    require(descriptor >= 0, "no file can be made here");
    unlink(path.c_str());
    {
        hytrain::SummedFile file(descriptor);
        for (std::size_t at = 0; at != content.size();) {
            const std::size_t most = random() % 4 == 0 ? 3000000 : 5000;
            const std::size_t n = std::min(content.size() - at, random() % most);
            const std::uint32_t sum = file.write(content.data() + at, n);
            require(sum == hytrain::crc32_portable(0, content.data() + at, n), "a piece's sum");
            at += n;
            if (random() % 300 == 0) file.flush();
        }
        file.flush();
        std::vector<std::uint32_t> sums;
        for (std::size_t at = 0; at < content.size(); at += file.kBlockBytes) {
            const std::size_t n = std::min(file.kBlockBytes + 0, content.size() - at);
            sums.push_back(hytrain::crc32_portable(0, content.data() + at, n));
        }
        require(file.sums() == sums, "the blocks' sums");
        require(file.num_bytes() == content.size(), "the length");
    }
    std::vector<unsigned char> found(content.size() + 1);
    std::size_t count = 0;
    for (ssize_t got = 1; got > 0; count += static_cast<std::size_t>(got)) {
        got = pread(descriptor, found.data() + count, found.size() - count,
                    static_cast<off_t>(count));
        require(got >= 0, "the file cannot be read");
    }
    found.resize(count);
    require(found == content, "the file has other bytes");
    close(descriptor);
}

}  // namespace

int main() {
    std::mt19937 random(11);
    std::vector<unsigned char> content(9 * hytrain::WriteBuffer::kBytes + 12345);
    for (unsigned char& byte : content) byte = static_cast<unsigned char>(random());
    test_sums(random, content);
    for (int i = 0; i < 5; ++i) test_file(random, content);
    hytrain::WriteBuffer::trim();
    std::printf("summed_file_test: passed\n");
    return 0;
}
