import java.io.ByteArrayOutputStream;
import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.concurrent.Callable;
import java.util.concurrent.CompletableFuture;
import java.util.stream.Stream;
import java.util.zip.GZIPOutputStream;

/**
 * The HTTP client of Java's standard library with its defaults: it offers h2c with each request on a new connection.
 * Run as `java JavaClient.java URL MODEL_FOLDER`. Prints a JSON line per feature, as checks.py does.
 */
public class JavaClient {
    static final String BODY = "{\"model\":\"tiny\",\"prompt\":\"This module\",\"max_tokens\":8%s}";
    static final HttpClient CLIENT = HttpClient.newHttpClient();
    static String url;

    public static void main(String[] arguments) throws Exception {
        url = arguments[0];
        check("GET", () -> {
            HttpRequest request = HttpRequest.newBuilder(URI.create(url + "/v1/models")).build();
            require(200, CLIENT.send(request, HttpResponse.BodyHandlers.ofString()), "\"tiny\"");
            return null;
        });
        check("POST on new connections", () -> {
            for (int i = 0; i < 3; i++) {
                require(200, HttpClient.newHttpClient().send(text(""), strings()), "finish_reason");
            }
            return null;
        });
        check("POST on one connection", () -> {
            for (int i = 0; i < 3; i++) {
                require(200, CLIENT.send(text(""), strings()), "finish_reason");
            }
            return null;
        });
        check("chunked body", () -> {
            byte[] bytes = String.format(BODY, "").getBytes(StandardCharsets.UTF_8);
            var publisher = HttpRequest.BodyPublishers.ofByteArrays(List.of(
                Arrays.copyOfRange(bytes, 0, 20), Arrays.copyOfRange(bytes, 20, bytes.length)));
            require(200, HttpClient.newHttpClient().send(post(publisher).build(), strings()), "finish_reason");
            return null;
        });
        check("expect 100-continue", () -> {
            HttpRequest request = post(text("").bodyPublisher().get()).expectContinue(true).build();
            require(200, HttpClient.newHttpClient().send(request, strings()), "finish_reason");
            return null;
        });
        check("gzip body", () -> {
            var compressed = new ByteArrayOutputStream();
            try (var gzip = new GZIPOutputStream(compressed)) {
                gzip.write(String.format(BODY, "").getBytes(StandardCharsets.UTF_8));
            }
            var publisher = HttpRequest.BodyPublishers.ofByteArray(compressed.toByteArray());
            HttpRequest request = post(publisher).header("content-encoding", "gzip").build();
            require(200, HttpClient.newHttpClient().send(request, strings()), "finish_reason");
            return null;
        });
        check("stream", () -> {
            HttpResponse<Stream<String>> response = HttpClient.newHttpClient()
                .send(text(",\"stream\":true"), HttpResponse.BodyHandlers.ofLines());
            List<String> lines = response.body().filter(line -> !line.isEmpty()).toList();
            if (!lines.get(lines.size() - 1).equals("data: [DONE]")) {
                throw new IllegalStateException("last line: " + lines.get(lines.size() - 1));
            }
            return null;
        });
        check("eight requests at once", () -> {
            HttpClient client = HttpClient.newHttpClient();
            var futures = new ArrayList<CompletableFuture<HttpResponse<String>>>();
            for (int i = 0; i < 8; i++) {
                futures.add(client.sendAsync(text(""), strings()));
            }
            for (var future : futures) {
                require(200, future.get(), "finish_reason");
            }
            return null;
        });
        check("413 for 20 MB", () -> {
            var publisher = HttpRequest.BodyPublishers.ofByteArray(new byte[20_000_000]);
            require(413, HttpClient.newHttpClient().send(post(publisher).build(), strings()), "larger than");
            return null;
        });
    }

    static HttpRequest text(String fields) {
        return post(HttpRequest.BodyPublishers.ofString(String.format(BODY, fields))).build();
    }

    static HttpRequest.Builder post(HttpRequest.BodyPublisher body) {
        return HttpRequest.newBuilder(URI.create(url + "/v1/completions"))
            .header("content-type", "application/json").timeout(Duration.ofSeconds(120)).POST(body);
    }

    static HttpResponse.BodyHandler<String> strings() {
        return HttpResponse.BodyHandlers.ofString();
    }

    static void require(int status, HttpResponse<String> response, String part) {
        if (response.statusCode() != status || !response.body().contains(part)) {
            throw new IllegalStateException(response.statusCode() + ": " + response.body());
        }
    }

    static void check(String feature, Callable<Void> work) {
        String error = "";
        try {
            work.call();
        } catch (Exception failure) {
            error = failure.toString().replaceAll("[^ -~]|[\"\\\\]", "'");
        }
        System.out.printf("{\"feature\": \"%s\", \"error\": \"%s\"}%n", feature, error);
    }
}
